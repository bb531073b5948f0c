"""Run the tests that compute as other machines would: ``python tests/other_machines.py`` writes the table in CONTRIBUTING.md.

Each row is one setting in a process of its own; what this processor does not have is left out. ``--only NAME`` runs one row and
prints it, ``--tests PATH ...`` takes other tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
#: What computes: kernels, losses, decoding, and logits that earlier versions stored.
TESTS = (
    "tests/ops/test_attention.py", "tests/ops/test_mapping.py", "tests/ops/test_numba_cpu.py", "tests/ops/test_numba_rows.py",
    "tests/ops/test_numba_above_two.py", "tests/ops/test_exact_attention.py", "tests/ops/test_kept_rows.py", "tests/losses",
    "tests/generation/test_exact_cache.py", "tests/integration/test_persistence.py", "tests/training/test_sparsify.py",
    "tests/analysis/test_collect.py",
)  # fmt: skip
#: Name, environment, flags that the processor must have.
SETTINGS: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    ("ATEN_CPU_CAPABILITY=default", {"ATEN_CPU_CAPABILITY": "default"}, ()),
    ("ATEN_CPU_CAPABILITY=avx2", {"ATEN_CPU_CAPABILITY": "avx2"}, ("avx2",)),
    ("NUMBA_CPU_NAME=generic", {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, ()),
    ("NUMBA_CPU_NAME=x86-64-v3", {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}, ("avx2", "fma")),
    ("NUMBA_CPU_NAME=skylake-avx512", {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ""}, ("avx512f", "avx512vl")),
    ("MKL_CBWR=COMPATIBLE", {"MKL_CBWR": "COMPATIBLE"}, ()),
    ("OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}, ()),
    ("OMP_NUM_THREADS=2", {"OMP_NUM_THREADS": "2"}, ()),
    ("OMP_NUM_THREADS=4", {"OMP_NUM_THREADS": "4"}, ()),
    ("files in reversed order", {}, ()),
    ("LC_ALL=tr_TR.UTF-8, TZ=Pacific/Kiritimati", {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"}, ()),
    ("a home folder that cannot be written", {}, ()),
    ("a path with a space in it", {}, ()),
]  # fmt: skip


def processor() -> set[str]:
    """The flags of this processor, where the system says them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


@contextmanager
def place(name: str, environment: dict[str, str]) -> Iterator[Path]:
    """The folder to run in; some settings are one of a place."""
    with tempfile.TemporaryDirectory() as folder:
        # Machine code of another processor must not be read, nor left behind.
        environment["NUMBA_CACHE_DIR"] = os.path.join(folder, "numba")
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        if "home" in name:
            home = Path(folder, "home")
            home.mkdir()
            home.chmod(stat.S_IRUSR | stat.S_IXUSR)
            # Such a folder does not stop an administrator; the files of the kernel do.
            home = Path("/sys") if os.access(home, os.W_OK) else home
            environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
            del environment["NUMBA_CACHE_DIR"]
        if "space" not in name:
            yield ROOT
            return
        copy = Path(folder, "a path with spaces")
        kept = shutil.ignore_patterns(".git", ".venv", "site", "runs", "__pycache__", "models", "quickstart-output")
        shutil.copytree(ROOT, copy, ignore=kept)
        yield copy


def run(name: str, settings: dict[str, str], tests: list[str]) -> str:
    """One row: what pytest counted, or what failed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **settings,
    }
    chosen = tests[::-1] if "reversed" in name else tests
    with place(name, environment) as folder:
        environment["PYTHONPATH"] = str(folder)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed or done.returncode:
        return (
            f"**{len(failed)} failed**: {', '.join(failed[:5])}" if failed else f"**did not run**: {done.stderr[-200:]}"
        )
    counts = re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])
    return ", ".join(f"{number} {what}" for number, what in counts)


def table(rows: list[tuple[str, str]]) -> str:
    """For the page."""
    return "\n".join(["| setting | tests |", "|---|---|", *(f"| {name} | {found} |" for name, found in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one setting, by its name")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    chosen = parser.parse_args()
    names = [name for name, _, _ in SETTINGS]
    if chosen.only is not None and chosen.only not in names:
        parser.error(f"--only {chosen.only!r} is none of {names}.")
    flags, rows = processor(), []
    for name, settings, needs in SETTINGS:
        if chosen.only not in (None, name):
            continue
        missing = [flag for flag in needs if flag not in flags]
        found = f"not run: this processor has no {', '.join(missing)}" if missing else run(name, settings, chosen.tests)
        rows.append((name, found))
        print(f"{name}: {found}", flush=True)
    if chosen.only is None and chosen.tests == list(TESTS):
        text = PAGE.read_text(encoding="utf-8")
        marked = re.compile(r"(?<=<!-- other machines -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
        PAGE.write_text(marked.sub(lambda _: table(rows), text), encoding="utf-8")
    return int(any("**" in found for _, found in rows))


if __name__ == "__main__":
    sys.exit(main())
