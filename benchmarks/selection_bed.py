"""The rules of docs/selection.md where p(y|x) is known: ten beds, minutes.

    python benchmarks/selection_bed.py --out runs/selection_bed [--seeds 0 1 …]

Each seed is a bed of its own. Three runs are followed along their iterations: CALM, CALM with a
weaker barrier (which overshoots) and plain fine-tuning on the same source tokens.
"""

import argparse
from pathlib import Path

import torch
from known_truth import METHODS, bed, fit_trajectory
from selection_table import Candidate, report, trajectory

from calm_lightning.backbone import load_tokenizer
from calm_lightning.data import known_truth
from calm_lightning.data.mcqa import option_ids, question_batches
from calm_lightning.data.near_misses import N_WRONG, near_miss_rows

RUNS = {
    "calm": METHODS["calm"],
    "weak barrier": METHODS["calm_weak_barrier"],
    "fine_tuning": METHODS["fine_tuning_same_tokens"],
}
EVERY, ROWS = 6, 400


def question_sets(folder: Path, seed: int) -> list[dict]:
    """Batches of the target, the other benchmark, and what the source's sel rows can be made into.

    near misses; "tokens": all answer words as options, the token-level and the answer-level view
    at once, since an answer is one token; "own": wrong options drawn by p(y|x).
    """
    tokenizer = load_tokenizer(str(folder))
    data = known_truth.data(folder, {"target": None, "other": None}, tokenizer=tokenizer)
    sel = data.source.source_splits()["sel"][:ROWS]
    rows, _ = near_miss_rows(sel, tokenizer, "first_token", seed)
    words = sorted(w for w in tokenizer.get_vocab() if w.startswith("answer"))
    every, own = [], []
    dice = torch.Generator().manual_seed(seed)
    p = known_truth.truth(folder)["source"][-len(data.source.source_splits()["sel"]) :]
    for i, (prompt, gold) in enumerate(sel):
        ids, options = option_ids(tokenizer, prompt, words, "first_token")
        weights = p[i].clone()
        weights[int(gold.removeprefix("answer"))] = 0
        wrong = [f"answer{j}" for j in weights.multinomial(N_WRONG, generator=dice).tolist()]
        for name, rows_of, offered in (("tokens", every, words), ("own", own, [gold, *wrong])):
            kept = [options[words.index(o)] for o in offered]
            rows_of.append(
                {"id": f"{i:05d}", "dataset": name, "question": prompt.text, "options": offered,
                 "prompt_ids": torch.tensor(ids), "option_ids": [torch.tensor(o) for o in kept],
                 "answer": offered.index(gold)}
            )  # fmt: skip
    loaders = [
        *data.target.test_dataloader(),
        *question_batches(rows + every + own, "first_token", 256),
    ]
    return [batch for loader in loaders for batch in loader]


def followed(args, seed: int) -> list[Candidate]:
    """Every candidate of one seed, from its file if it is there."""
    file = args.out / f"{seed}.candidates"
    if file.exists():
        return torch.load(file, weights_only=False)
    folder = bed(args.out, seed)
    batches = question_sets(folder, seed)
    found = []
    for run, (method, options) in RUNS.items():
        points = fit_trajectory(folder, method, options, EVERY, batches, seed)
        for k, at in points:
            if k == 0 and run != "calm":
                continue  # iteration 0 is the same for all
            for alpha, variant in (("dropped", "theta"), ("applied", "both")):
                if alpha == "applied" and (k == 0 or run == "fine_tuning"):
                    continue
                sets = {d: s for (d, v), s in at.items() if v == variant}
                answers = {
                    {"near misses": "near_first"}.get(d, d): (s.confidence, s.correct)
                    for d, s in sets.items()
                }
                words = sets["tokens"]
                entropy = float(torch.special.entr(words.probs).sum(-1).mean())
                found.append(
                    Candidate("base" if k == 0 else run, seed, k, alpha, answers,
                              words.summary(10)["nll"], entropy)
                )  # fmt: skip
    torch.save(found, file)
    print(f"seed {seed}: {len(found)} candidates", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(10)))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    candidates = [c for seed in args.seeds for c in followed(args, seed)]
    for run in RUNS:
        print(f"\n**{run}**\n", *trajectory(candidates, run, ("target",)), sep="\n")
    print("\n**target**\n", *report(candidates, ("target",), ("other",), "calm"), sep="\n")
