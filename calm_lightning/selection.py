"""Which checkpoint a run serves, with alpha or without: chosen without a look at the target.

Maximum entropy has no target value: a run passes the point where confidence meets accuracy and goes
on. So `fit` validates as it goes, at iteration 0 first, on questions that share nothing with the
test, and keeps the state whose confidence is nearest to its accuracy there. docs/selection.md has
what this and other rules are worth.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from calm_lightning.data.files import write_whole
from calm_lightning.module import CalibrationModule
from calm_lightning.scoring import Scored

#: Of iteration 0's on the same questions, the paper's filter: who pays more has repaired nothing
LEAST_ACCURACY = 0.8
RULE = (
    "least |confidence - accuracy| on the worst of the question sets, with accuracy of at least "
    f"{LEAST_ACCURACY} x iteration 0's"
)
FIXED = "the fixed number of outer iterations"


@dataclass(frozen=True)
class Candidate:
    """A state that could be served, and what it shows on the questions that it is chosen by."""

    method: str  # "calm", or a control's name
    iteration: int  # train items done; 0 is the model as it came
    alpha: str  # "applied" or "dropped"
    score: float  # the largest |gap|: a mean of many rows has no bins and no noise floor
    accuracy: float  # of all questions together
    mean_confidence: float
    gaps: dict[str, float]  # data set -> mean confidence - accuracy


def candidates(
    method: str, iteration: int, scored: Sequence[Scored], used: dict[str, tuple[bool, bool]]
) -> list[Candidate]:
    """What one state's variants show; `used`: variant -> (theta trained?, alpha applied?)."""
    found = []
    for variant, (_, applied) in used.items():
        sets = [s for s in scored if s.variant == variant and s.dataset != "all"]
        if not sets:
            continue
        gaps = {f"{s.dataset} by {s.scoring}": s.overconfidence for s in sets}
        accuracy = float(torch.cat([s.correct for s in sets]).float().mean())
        confidence = float(torch.cat([s.confidence for s in sets]).mean())
        alpha, score = "applied" if applied else "dropped", max(map(abs, gaps.values()))
        found.append(Candidate(method, iteration, alpha, score, accuracy, confidence, gaps))
    return found


def choose(candidates: Sequence[Candidate], base: Candidate | None = None) -> Candidate:
    """The candidate of the lowest score among those accurate enough; of equals the first.

    Accurate enough: at least `LEAST_ACCURACY` times the accuracy of iteration 0, `base` if it is
    not among the candidates. Where none of them is, the lowest score.

    Raises:
        ValueError: no candidate of iteration 0 to compare with.

    >>> early = Candidate("calm", 0, "dropped", 0.2, 0.5, 0.7, {"a": 0.2})
    >>> late = Candidate("calm", 8, "dropped", 0.01, 0.3, 0.31, {"a": 0.01})
    >>> choose([early, late]) == early  # the late one forgot too much
    True
    """
    base = base or next((c for c in candidates if c.iteration == 0), None)
    if base is None:
        raise ValueError(
            "there is no candidate of iteration 0: set trainer.num_sanity_val_steps to -1, which "
            "validates before the first step"
        )
    least = LEAST_ACCURACY * base.accuracy
    return min(candidates, key=lambda c: (c.accuracy < least, c.score))


class ChooseCheckpoint(Checkpoint):
    """Keeps the state that the rule prefers, and selection.json with every candidate.

    Needs question batches among the validation loaders and `num_sanity_val_steps=-1`, which makes
    iteration 0 a candidate. Without validation there is nothing to choose by: the run's end is it.

    Args:
        run_dir: where selection.json and the checkpoint go.
        method: what the candidates are called.
        file: the name of the checkpoint.
        rivals: candidates of other methods on the same questions, already known.
    """

    def __init__(
        self,
        run_dir: str | Path,
        method: str = "calm",
        file: str = "chosen.ckpt",
        rivals: Sequence[Candidate] = (),
    ):
        self.run_dir, self.method, self.file = Path(run_dir), method, file
        self.rivals, self.candidates, self.split = list(rivals), [], ""
        self.resumed = False

    @property
    def path(self) -> Path:
        """The checkpoint."""
        return self.run_dir / self.file

    def on_train_start(self, trainer: Trainer, pl_module: CalibrationModule) -> None:
        """Of a run that goes on, take what was validated after its last.ckpt was written too."""
        path, done = self.run_dir / "selection.json", trainer.fit_loop.total_batch_idx + 1
        if self.resumed and path.exists():
            known = json.loads(path.read_text()).get("candidates", [])
            ours = [Candidate(**c) for c in known if c["method"] == self.method]
            self.candidates = [c for c in ours if c.iteration <= done]

    def on_validation_end(self, trainer: Trainer, pl_module: CalibrationModule) -> None:
        """Add what was just validated; keep the state if it is the best of this run so far."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:
            return
        if not pl_module.trains_theta:  # fitted at the end of an epoch, after its validation
            return
        if trainer.sanity_checking and trainer.num_sanity_val_steps != float("inf"):
            raise ValueError(
                "iteration 0 has to be asked every question: set trainer.num_sanity_val_steps to -1"
            )
        done = trainer.fit_loop.total_batch_idx + 1
        fresh = candidates(self.method, done, pl_module.scored, pl_module.candidates)
        if not fresh:
            return
        sizes = {
            f"{s.dataset} by {s.scoring}": len(s.id) for s in pl_module.scored if s.dataset != "all"
        }
        self.split = ", ".join(f"{name}, N = {n}" for name, n in sizes.items())
        self.candidates += fresh
        best = self._best()
        if best in fresh:
            pl_module.alpha_chosen = best.alpha == "applied"
            trainer.save_checkpoint(self.path, weights_only=True)
            pl_module.alpha_chosen = None  # last.ckpt has not been chosen
        if trainer.is_global_zero:
            self.write()

    def _best(self) -> Candidate:
        """Our own best: whichever method wins, the best state of each is kept."""
        return choose(self.candidates, next((c for c in self.rivals if c.iteration == 0), None))

    def on_train_end(self, trainer: Trainer, pl_module: CalibrationModule) -> None:
        """Say that nothing was chosen, where nothing was."""
        if self.file == "chosen.ckpt" and not self.candidates and trainer.is_global_zero:
            done = trainer.fit_loop.total_batch_idx + 1
            alpha = "applied" if pl_module.alpha_in_use else "dropped"
            chosen = {"method": self.method, "iteration": done, "alpha": alpha}
            self._write({"rule": FIXED, "split": "none", "n_candidates": 1, "chosen": chosen})

    def write(self) -> None:
        """selection.json: rule, questions, the choice, what this run serves, all candidates."""
        found = [*self.rivals, *self.candidates]
        ours = [c for c in found if c.method == found[0].method]
        self._write(
            {
                "rule": RULE,
                "split": self.split,
                "n_candidates": len(found),
                "chosen": asdict(choose(found)),
                "served": asdict(choose(ours)),  # chosen.ckpt: the best of the run's own method
                "candidates": [asdict(c) for c in found],
            }
        )

    def _write(self, document: dict[str, Any]) -> None:
        write_whole(self.run_dir / "selection.json", json.dumps(document, indent=1))

    def state_dict(self) -> dict[str, Any]:
        """Candidates so far: a resumed run goes on with them."""
        return {"candidates": [asdict(c) for c in self.candidates], "split": self.split}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the candidates of the run that is resumed."""
        self.candidates = [Candidate(**c) for c in state["candidates"]]
        self.split, self.resumed = state["split"], True
