"""The benchmarks that nobody can run here at full size still run."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", BENCHMARKS / name, *words],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_gpu_script_at_small_size():
    said = run("gpu.py", "--small", "--inner_steps", "2")
    assert said.count("| SFT step |") == said.count("| outer iteration, T 2 |") == 2
    assert "on the device: as in float64" in said


@pytest.mark.slow
def test_gpu_script_says_that_there_is_no_gpu():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, torch, runpy; torch.cuda.is_available = lambda: False; "
         f"sys.argv = ['gpu.py']; runpy.run_path({str(BENCHMARKS / 'gpu.py')!r}, "
         "run_name='__main__')"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "there is no GPU here" in done.stderr


@pytest.mark.slow
def test_head_costs_less_than_naive_autograd():
    said = run("cost.py", "head", "--rows", "512", "--hidden", "64", "--vocab", "16384")
    lines = [line.split(" | ") for line in said.splitlines() if ": ours |" in line]
    assert len(lines) == 2
    for _, _, time, _, memory in lines:
        assert float(memory.strip(" |")) < 0.2  # chunks of 64 rows of 512
        assert float(time) < 1.3  # a busy machine; RESULTS.md has the figures
