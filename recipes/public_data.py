"""Lay the files of a cloned public repository out as the recipes read them.

    git clone https://github.com/multi30k/dataset multi30k
    python recipes/public_data.py multi30k multi30k
    export HF_ENTMAX_DATA=data
    python recipes/translation.py --config recipes/configs/translation_multi30k.yaml --out runs/mt

`recipes/data/README.md` lists the sets with source, licence and size. Sources are read as they are; what is written is compressed,
with nothing of the time or the machine in it, and the same for everybody: a fingerprint of each set is printed.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

from common.public_sets import SETS, lay_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SETS))
    parser.add_argument("repository", type=Path, help="folder of the clone; tatoeba: folder of deu-eng.zip")
    parser.add_argument("--out", type=Path, default=Path("data"), help="what $HF_ENTMAX_DATA is to name")
    args = parser.parse_args()
    try:
        found, published = lay_out(args.name, args.repository, args.out), SETS[args.name].fingerprint
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    same = "that of the published results" if found == published else f"the published results are from {published}"
    print(f"fingerprint {found}: {same}")


if __name__ == "__main__":
    main()
