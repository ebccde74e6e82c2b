"""Texts to tokens, by the tokenizer files that lie beside a model."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.pretrained.files import extra, read_json
from theory._checks import instance, invalid

SAMPLE = "alice.txt"  # beside this module
FILES = "tokenizer.json, or vocab.txt (BERT), or vocab.json and merges.txt (GPT-2)"


class TokenizedText(NamedTuple):
    """A text as a model reads it."""

    ids: np.ndarray  # (L,) int32
    strings: tuple[str, ...]  # as the vocabulary has them: "##ing" goes on with a word, "Ġ" is a space


class TextTokenizer:
    """A tokenizer that equals any other of the same content, so that a model read again is not compiled again."""

    def __init__(self, tokenizer: Any):
        # files may hold a shorter limit than the model's window, and padding that attention must not see
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._content = tokenizer.to_str()
        self._hash = hash(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextTokenizer) and self._content == other._content

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"TextTokenizer({type(self._tokenizer.model).__name__}, {self.size} tokens)"

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def marks(self) -> int:
        """How many marks of beginning and end a text gets."""
        return self._tokenizer.num_special_tokens_to_add(False)

    def encode(self, text: Any, *, window: int, truncate: Any = False) -> TokenizedText:
        """Ids and names of the tokens, at most `window` of them."""
        instance("truncate", truncate, bool)
        if window <= self.marks:
            raise invalid("window", f"room for a token beside {self.marks} marks of beginning and end", window)
        if not isinstance(text, str):
            raise invalid("text", "a str", repr(text))
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise invalid("text", "valid Unicode", f"{text[:50]!r} ({error})") from error
        if not encoding.ids:
            raise invalid("text", "at least one token", repr(text))
        count = len(encoding.ids) + self.marks
        if count > window:
            if not truncate:
                expected = f"at most {window} tokens (truncate=True leaves out the rest)"
                raise invalid("text", expected, f"{count} tokens")
            encoding.truncate(window - self.marks)
        encoding = self._tokenizer.post_process(encoding, add_special_tokens=True)
        return TokenizedText(np.array(encoding.ids, np.int32), tuple(encoding.tokens))


def read_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a model's folder.

    Raises:
        ValueError: if no file of it is there, or one cannot be read, or holds what it may not.
    """
    tokenizers = extra("tokenizers")
    whole, wordpieces = folder / "tokenizer.json", folder / "vocab.txt"
    pairs = folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        path, read = whole, lambda: tokenizers.Tokenizer.from_str(whole.read_text(encoding="utf-8"))
    elif wordpieces.is_file():
        options = _wordpiece_options(folder / "tokenizer_config.json")
        path, read = wordpieces, lambda: _wordpiece(wordpieces, options)
    elif all(pair.is_file() for pair in pairs):
        path, read = pairs[0], lambda: _byte_pairs(*pairs)
    else:
        raise invalid("tokenizer", f"{FILES} in {folder}", "none of them")
    try:
        return TextTokenizer(read())
    except Exception as error:  # the package raises bare Exceptions
        raise invalid(str(path), "a tokenizer", str(error)) from error


class _WordpieceOptions(NamedTuple):
    special: list[str]  # what stands for unknown words, the beginning and the end
    lower: bool
    chinese: bool  # whether each sign is a word
    strip_accents: bool | None  # None: as `lower`


def _wordpiece_options(path: Path) -> _WordpieceOptions:
    """From tokenizer_config.json, BERT's own where it says nothing."""
    values = read_json(path) if path.is_file() else {}

    def token(name: str) -> str:
        value = values.get(f"{name}_token", f"[{name.upper()}]")
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str):
            raise invalid(f"{path}: {name}_token", "a token, or an object with its content", repr(value))
        return content

    def flag(name: str, default: Any, choices: tuple[Any, ...] = (True, False)) -> Any:
        value = values.get(name, default)
        if not any(value is choice for choice in choices):
            raise invalid(f"{path}: {name}", " or ".join(map(repr, choices)), repr(value))
        return value

    return _WordpieceOptions(
        [token(name) for name in ("unk", "cls", "sep")],
        flag("do_lower_case", True),
        flag("tokenize_chinese_chars", True),
        flag("strip_accents", None, (True, False, None)),
    )


def _wordpiece(path: Path, options: _WordpieceOptions) -> Any:
    """BERT's: words and signs, then the longest pieces found in the vocabulary, between [CLS] and [SEP]."""
    tokenizers = extra("tokenizers")
    lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")  # other separators of lines are tokens
    vocabulary = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    special = options.special
    if missing := [token for token in special if token not in vocabulary]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    unknown, first, last = special
    wordpiece = tokenizers.models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)
    tokenizer = tokenizers.Tokenizer(wordpiece)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=options.lower, handle_chinese_chars=options.chinese, strip_accents=options.strip_accents
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(
        (last, vocabulary[last]), (first, vocabulary[first])
    )
    marks = [token for token in (*special, "[PAD]", "[MASK]") if token in vocabulary]
    tokenizer.add_special_tokens(marks)
    return tokenizer


def _byte_pairs(vocabulary: Path, merges: Path) -> Any:
    """GPT-2's: bytes, merged pair by pair."""
    tokenizers = extra("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if "<|endoftext|>" in tokenizer.get_vocab():
        tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def sample_text() -> str:
    """The beginning of Lewis Carroll's *Alice's Adventures in Wonderland* (1865, in the public domain): 759 words.

    Example:
        >>> sample_text()[:31]
        'Alice was beginning to get very'
    """
    return Path(__file__).with_name(SAMPLE).read_text(encoding="utf-8")
