"""How an option gets its probability, with and without the adjustment (d, l), in one forward."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calm_lightning import metrics

CHUNK = 256  # rows of (rows, V) float32 logits held at once
IDLE = 32  # tokens of ended options that a pass may carry; a pass of its own costs about as much

Variants = Mapping[str, Callable[[Tensor], Tensor] | None]


@torch.no_grad()
def option_log_probs(
    backbone, batch: Mapping[str, Any], variants: Variants
) -> dict[str, tuple[Tensor, Tensor]]:
    """Score every option of every question under each variant, with one pass through the body.

    A variant maps logits (N, V) to adjusted ones (an `Alpha`), or is None for the logits as such.
    Probabilities are over the full vocabulary, in float32. An option of one token has that token's
    log-probability after the prompt; a longer one the sum over its tokens ("text") or their mean
    ("text_mean"). All on the device of `batch["n_options"]`.

    Returns:
        For each variant log_probs (Q, K), -inf beyond a question's own options, and option_mass
        (Q,), the probability that the options have together (of their whole text).
    """
    device, n_options = batch["n_options"].device, batch["n_options"]
    lengths = _padded([torch.tensor([len(o) for o in row]) for row in batch["option_ids"]], device)
    real = torch.arange(lengths.shape[1], device=device) < n_options[:, None]
    first = _padded([torch.stack([o[0] for o in row]) for row in batch["option_ids"]], device)
    single = int(lengths.max()) == 1

    # Longer options need the prompt's cache, which continues at the right end: pad on the left.
    prompts, mask = _pad(batch["prompt_ids"], device, left=not single)
    if single:
        hidden, cache = backbone.hidden(prompts, mask)
        states = hidden[torch.arange(len(hidden), device=device), mask.sum(1) - 1]
    else:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden, cache = backbone.hidden(prompts, mask, position_ids=positions, use_cache=True)
        states = hidden[:, -1]
    totals = _token_log_probs(backbone, states, first, variants)

    if not single:
        for name, rest in _rest_log_probs(backbone, batch, mask, cache, variants).items():
            totals[name][real] += rest

    result = {}
    for name, total in totals.items():
        total = total.masked_fill(~real, -torch.inf)
        mass = total.exp().sum(1)
        if batch["scoring"] == "text_mean":
            total = total / lengths.clamp(min=1)
        result[name] = (total, mass)
    return result


def probabilities(log_probs: Tensor) -> Tensor:
    """Turn log_probs (Q, K) into probabilities among a question's options, 0 beyond them."""
    return log_probs.softmax(-1)


def prediction_rows(
    batch: Mapping[str, Any], log_probs: Tensor, mass: Tensor, raw: Tensor
) -> list[dict[str, Any]]:
    """One dict a question: what was asked, probabilities and those without alpha (`raw`), answer.

    All of log_probs and raw are (Q, K); mass is (Q,).
    """
    probs, raw, rows = probabilities(log_probs), probabilities(raw), []
    for i, k in enumerate(batch["n_options"].tolist()):
        p, answer = probs[i, :k], int(batch["answer"][i])
        prediction = int(p.argmax())
        rows.append(
            {
                "id": batch["id"][i],
                "dataset": batch["dataset"],
                "scoring": batch["scoring"],
                "question": batch["question"][i],
                "options": batch["options"][i],
                "answer": answer,
                "probs": p.tolist(),
                "probs_raw": raw[i, :k].tolist(),
                "prediction": prediction,
                "confidence": float(p.max()),
                "entropy": float(torch.special.entr(p).sum()),
                "option_mass": float(mass[i]),
                "correct": None if answer < 0 else prediction == answer,
            }
        )
    return rows


class Scored(NamedTuple):
    """Every test question of one data set under one variant of the model, in order of id."""

    dataset: str
    scoring: str
    variant: str
    id: list[str]
    probs: Tensor  # (Q, K), 0 beyond a question's options
    answer: Tensor  # (Q,)
    n_options: Tensor  # (Q,)
    option_mass: Tensor  # (Q,) probability of all options together

    @property
    def confidence(self) -> Tensor:
        """(Q,) largest probability."""
        return self.probs.max(-1).values

    @property
    def correct(self) -> Tensor:
        """(Q,) bool."""
        return self.probs.argmax(-1) == self.answer

    @property
    def overconfidence(self) -> float:
        """Mean confidence - accuracy."""
        return float(self.confidence.double().mean() - self.correct.double().mean())

    def summary(self, n_bins: int) -> dict[str, float]:
        """Every metric; see `metrics.summary`."""
        return metrics.summary(self.probs, self.answer, self.n_options, n_bins)


def distributed() -> bool:
    """Whether this is one of several processes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Tally:
    """Scored questions of many batches, gathered over processes at the end."""

    def __init__(self):
        self.rows: dict[tuple[str, str, str], list[tuple]] = {}

    def add(self, batch: Mapping[str, Any], variant: str, log_probs: Tensor, mass: Tensor) -> None:
        """Keep a batch's questions under one variant."""
        columns = (probabilities(log_probs), batch["answer"], batch["n_options"], mass)
        rows = zip(batch["id"], *(column.cpu() for column in columns), strict=True)
        self.rows.setdefault((batch["dataset"], batch["scoring"], variant), []).extend(rows)

    def gather(self) -> list[Scored]:
        """A `Scored` for each data set and variant, and one for their union "all"; then empty."""
        rows, self.rows = self.rows, {}
        if distributed():
            parts: list = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, rows)
            rows = {}
            for part in parts:
                for key, some in part.items():
                    rows.setdefault(key, []).extend(some)
        for (dataset, scoring, variant), some in list(rows.items()):
            named = [(f"{dataset}/{row[0]}", *row[1:]) for row in some]
            rows.setdefault(("all", scoring, variant), []).extend(named)
        return [_scored(key, some) for key, some in rows.items()]


def _scored(key: tuple[str, str, str], rows: list[tuple]) -> Scored:
    rows = sorted(rows, key=lambda row: row[0])  # batches come in order of length
    ids, probs, *columns = zip(*rows, strict=True)
    width = max(len(p) for p in probs)
    padded = torch.stack([torch.nn.functional.pad(p, (0, width - len(p))) for p in probs])
    return Scored(*key, list(ids), padded, *(torch.stack(column) for column in columns))


def _rest_log_probs(backbone, batch, mask, cache, variants: Variants) -> dict[str, Tensor]:
    """Sum the log-probabilities of each option's tokens after its first, (N,) for all N options.

    In passes, each of the options that still go on: one that has ended is soon left out.
    """
    device = mask.device
    question = torch.arange(len(mask), device=device).repeat_interleave(batch["n_options"])
    options = [option for row in batch["option_ids"] for option in row]
    ids, _ = _pad(options, device, left=False)
    # The last token of an option predicts nothing that is asked for: inputs end before it.
    length = torch.tensor([len(option) - 1 for option in options], device=device)
    totals = {name: torch.zeros(len(options), device=device) for name in variants}
    going, rows, start = torch.arange(len(options), device=device), question, 0
    while (more := length[going] > start).any():
        going = going[more]
        cache.batch_select_indices(rows[more])
        columns = torch.arange(start, int(length[going].max()), device=device)
        idle = (length[going][:, None] <= columns[1:]).sum(0).cumsum(0)
        columns = columns[: 1 + int((idle <= IDLE).sum())]
        end, before = start + len(columns), mask[question[going]]
        hidden, _ = backbone.hidden(
            ids[going, start:end],
            torch.cat([before, before.new_ones(len(going), end)], 1),
            cache=cache,
            position_ids=before.sum(1)[:, None] + columns,
            use_cache=True,
        )
        real = columns < length[going][:, None]
        wanted = ids[going, start + 1 : end + 1][real][:, None]
        owner = going[real.nonzero()[:, 0]]
        for name, log_probs in _token_log_probs(backbone, hidden[real], wanted, variants).items():
            totals[name].index_add_(0, owner, log_probs[:, 0])
        rows, start = torch.arange(len(going), device=device), end
    return totals


def _token_log_probs(backbone, states: Tensor, wanted: Tensor, variants: Variants):
    """Return log p(wanted (N, K)) after states (N, H) under each variant, float32 (N, K)."""
    found = {
        name: torch.empty(wanted.shape, dtype=torch.float32, device=states.device)
        for name in variants
    }
    for start in range(0, len(states), CHUNK):
        rows = slice(start, start + CHUNK)
        z = backbone.logits(states[rows]).float()
        for name, alpha in variants.items():
            adjusted = z if alpha is None else alpha(z)
            normaliser = adjusted.logsumexp(-1, keepdim=True)
            found[name][rows] = adjusted.gather(1, wanted[rows]) - normaliser
    return found


def _padded(rows: list[Tensor], device) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)


def _pad(rows: list[Tensor], device, left: bool) -> tuple[Tensor, Tensor]:
    """Pad id tensors to one length; return ids (N, L), 0 where padded, and the mask (N, L)."""
    side = "left" if left else "right"
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_side=side)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)
