"""Attention of real transformers: GPT-2 and BERT in JAX, read from safetensors.

Needs the extra: `pip install 'headsplit[pretrained]'`. Importing the package does not.
"""

from sim.pretrained.attention import Attention as Attention
from sim.pretrained.attention import vectors as vectors
from sim.pretrained.load import load_pretrained as load_pretrained
from sim.pretrained.models import GPT2 as GPT2
from sim.pretrained.models import Bert as Bert
from sim.pretrained.models import Transformer as Transformer
from sim.pretrained.text import TokenizedText as TokenizedText
from sim.pretrained.text import sample_text as sample_text
