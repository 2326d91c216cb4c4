"""A bed where the truth is known: a tiny Llama, too sure of shifted questions, as ordinary files.

Every method, DataModule and the command line take the files of `write` as any others; how they
come about is told in `known_world`. With p(y|x) of every row, calibration has no label noise.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from calm_lightning.data.alpaca import AlpacaDataModule
from calm_lightning.data.known_world import SHIFTED, World, tokenizer
from calm_lightning.data.mcqa import MCQADataModule
from calm_lightning.data.shift import Shift
from calm_lightning.metrics import bin_index

OPTIONS = 4


def write(folder: str | Path, seed: int = 0) -> Path:
    """Write the bed of one seed; one seed gives one bed (on one machine).

    A model folder that also holds source.jsonl (instruction, input, output), target.jsonl and
    other.jsonl (id, question, options, answer), and truth.safetensors. It appears when it is whole.

    Raises:
        ValueError: the folder exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists: name a new folder, or remove it to write it anew.")
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)

    world = World(seed)
    texts, p = world.rows("source")
    answers = world.answers(p).tolist()
    rows = [
        {"instruction": text, "input": "", "output": f"answer{answer}"}
        for text, answer in zip(texts, answers, strict=True)
    ]
    _write_rows(aside / "source.jsonl", rows)
    truths = {"source": p}
    for name in SHIFTED:
        truths[name] = _write_questions(world, name, aside / f"{name}.jsonl")
    save_file(truths, aside / "truth.safetensors")
    tokenizer().save_pretrained(aside)
    world.aligned_lm().save_pretrained(aside)
    return aside.rename(folder)


def truth(folder: str | Path) -> dict[str, Tensor]:
    """p(y|x) in file order: source (N, ANSWERS), target and other (N, OPTIONS) of the options."""
    return load_file(Path(folder) / "truth.safetensors")


def true_errors(scored, folder: str | Path) -> tuple[float, float]:
    """Calibration against p(y|x) instead of drawn labels, of a `Scored` of target or other.

    Returns:
        E|conf − p(correct)| over questions, which only the true posterior brings to 0, and
        conf-ECE (M = 10) with p(correct) in the place of correct.

    Raises:
        ValueError: another data set.
    """
    if scored.dataset not in SHIFTED:
        raise ValueError(
            f'{folder} holds no truth of "{scored.dataset}": score {" or ".join(SHIFTED)}.'
        )
    p = truth(folder)[scored.dataset][[int(i) for i in scored.id]]
    over = scored.confidence - p.gather(1, scored.probs.argmax(-1, keepdim=True))[:, 0]
    binned = torch.bincount(bin_index(scored.confidence, 10), weights=over.double())
    return over.abs().mean().item(), binned.abs().sum().item() / len(over)


def data(folder: str | Path, tested: tuple[str, ...] = ("target",), **source: Any) -> Shift:
    """Fit on the source, test on all questions of `tested` (target, other) by first token.

    `source` goes to its AlpacaDataModule: batch_size, inner_steps, seed, tokenizer, …
    """
    folder = Path(folder)
    columns = {key: key for key in ("question", "options", "answer")}
    return Shift(
        AlpacaDataModule(str(folder / "source.jsonl"), form="question", **source),
        MCQADataModule(
            dict.fromkeys(tested),
            files={name: {"path": str(folder / f"{name}.jsonl"), **columns} for name in tested},
            scoring="first_token",
            eval_batch_size=256,
            tokenizer=source.get("tokenizer"),
        ),
    )


def _write_questions(world: World, name: str, path: Path) -> Tensor:
    """Draw options by p(y|x), so plausible ones, and among them alone the answer."""
    texts, p = world.rows(name)
    options = p.multinomial(OPTIONS, generator=world.dice)
    order = torch.rand(options.shape, generator=world.dice).argsort(1)  # likely ones came first
    options = options.gather(1, order)
    p = p.gather(1, options)
    p /= p.sum(1, keepdim=True)
    drawn = zip(texts, options.tolist(), world.answers(p).tolist(), strict=True)
    rows = [
        {
            "id": f"{i:05d}",  # in order of id, as tests report them, is in order of the file
            "question": text,
            "options": [f"answer{y}" for y in offered],
            "answer": answer,
        }
        for i, (text, offered, answer) in enumerate(drawn)
    ]
    _write_rows(path, rows)
    return p


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
