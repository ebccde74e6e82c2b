"""Keeps stored results of `headsplit figure --all` for tests/figures/test_recorded.py; run by hand.

python tests/figures/record.py results/figures
"""

import json
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent / "recorded"


def record(folder: Path) -> None:
    """The store of one figure as a file, and its key numbers."""
    files = sorted(path for path in (folder / "result.zarr").rglob("*") if path.is_file())
    with zipfile.ZipFile(HERE / f"{folder.name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as kept:
        for path in files:
            # a fixed date: the same result gives the same file
            kept.writestr(zipfile.ZipInfo(str(path.relative_to(folder))), path.read_bytes(), zipfile.ZIP_DEFLATED)
    numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
    (HERE / f"{folder.name}.json").write_text(json.dumps(numbers, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    for given in sorted(Path(sys.argv[1]).iterdir()):
        if (given / "numbers.json").exists():
            record(given)
            print(given.name)
