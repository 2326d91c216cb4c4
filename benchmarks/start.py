"""How long `calm --help` takes beside the libraries it is built on.

    python benchmarks/start.py [--rounds 5]

CPU time (user and system) of whole processes that take turns, after one untimed round; the ratio is
the median over rounds. Then what `import calm_lightning.metrics` brings in.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "calm --help": [str(Path(sys.executable).with_name("calm")), "--help"],
    "import lightning, transformers": [sys.executable, "-c", "import lightning, transformers"],
}
LOADED = """
import sys
import calm_lightning.metrics
print(sorted({"lightning", "transformers", "peft", "datasets"} & set(sys.modules)))
"""


def seconds(command: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of one process."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = range(parser.parse_args().rounds)
    for command in COMMANDS.values():
        seconds(command)  # files into the page cache, bytecode written
    found = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in rounds]
    print("| process | CPU s | wall s |\n|---|---:|---:|")
    for name in COMMANDS:
        cpu, wall = (statistics.median(times[name][i] for times in found) for i in (0, 1))
        print(f"| `{name}` | {cpu:.2f} | {wall:.2f} |")
    ours, theirs = COMMANDS
    ratios = [times[ours][0] / times[theirs][0] for times in found]
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"\nRatio of CPU time: median {statistics.median(ratios):.2f} ({each})")
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    print(f"`import calm_lightning.metrics` loads {loaded.stdout.strip() or loaded.stderr}")


if __name__ == "__main__":
    main()
