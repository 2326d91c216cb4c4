"""Questions made of a source's own held-out rows: the gold response against near misses.

A source of free text has no options to be sure about. Here each row gets three wrong ones:
responses of about the same length that answer the most similar other prompts of the split. Random
responses are too easy: the model tells them apart with certainty, and nothing is measured.
"""

import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from scipy import sparse

from calm_lightning.data.mcqa import option_ids
from calm_lightning.data.prompts import Prompt

N_WRONG = 3
LENGTH_RATIO = 2.0  # of characters, between the gold response and a wrong one


def tf_idf(texts: list[str]) -> sparse.csr_array:
    """Words of each text, (N, V): how often times how rare, rows of length 1 (or 0)."""
    counts = [Counter(text.casefold().split()) for text in texts]
    column = {word: j for j, word in enumerate(sorted(set().union(*counts)))}
    cells = [(n, i, column[word]) for i, row in enumerate(counts) for word, n in row.items()]
    n, i, j = (np.array(part) for part in zip(*cells, strict=True))
    idf = np.log(len(texts) / np.bincount(j))  # 0 for the words of the template
    weight = n * idf[j]
    norm = np.sqrt(np.bincount(i, weight**2, minlength=len(texts)))
    weight = weight / np.where(norm > 0, norm, 1)[i]
    return sparse.csr_array((weight, (i, j)), shape=(len(texts), len(column)))


def near_miss_rows(
    rows: list[tuple[Prompt, str]],
    tokenizer,
    scoring: str,
    seed: int = 0,
    count: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Evaluation rows (see `mcqa.question_batches`) of (prompt, response) pairs, and a report.

    At most `count`, the first that can be made, in file order; the order of their options is
    seeded. A row is left out, and counted, where fewer than three other responses are within a
    factor of two of its length and differ in their text ("first_token": in their first token), or
    where the tokenizer merges the response's beginning with the prompt's end.

    Raises:
        ValueError: no question can be made.
    """
    words = tf_idf([prompt.text for prompt, _ in rows])
    made, report = [], {"rows": len(rows), "merged with the prompt": 0, "too few near misses": 0}
    for i, (prompt, gold) in enumerate(rows):
        if len(made) == count:
            break
        options = [gold]
        try:
            prompt_ids, ids = option_ids(tokenizer, prompt, options, scoring)
        except ValueError:  # its first token holds the end of the prompt too
            report["merged with the prompt"] += 1
            continue
        taken = {_key(gold, ids[0], scoring)}
        near = (words @ words[[i]].T).toarray()[:, 0]  # cosine of this prompt and every other
        for j in np.argsort(-near, kind="stable"):
            wrong = rows[j][1]
            ratio = len(wrong) / len(gold)
            if len(options) > N_WRONG:
                break
            if not 1 / LENGTH_RATIO <= ratio <= LENGTH_RATIO:
                continue
            try:
                _, (found,) = option_ids(tokenizer, prompt, [wrong], scoring)
            except ValueError:
                continue  # no option after this prompt; the next nearest may be one
            key = _key(wrong, found, scoring)
            if key not in taken:
                taken.add(key)
                options.append(wrong)
                ids.append(found)
        if len(options) <= N_WRONG:
            report["too few near misses"] += 1
            continue
        order = random.Random(f"{seed}/{i}").sample(range(len(options)), len(options))
        made.append(
            {
                "id": f"sel-{i}",
                "dataset": "near misses",
                "question": prompt.text,
                "options": [options[k] for k in order],
                "prompt_ids": torch.tensor(prompt_ids),
                "option_ids": [torch.tensor(ids[k]) for k in order],
                "answer": order.index(0),
            }
        )
    report["used"] = len(made)
    if not made:
        raise ValueError(
            f"no question can be made of {len(rows)} rows of sel: each has fewer than {N_WRONG} "
            'near misses; give sel more rows in `sizes`, or score them by "text".'
        )
    return made, report


def _key(text: str, ids: list[int], scoring: str) -> Any:
    """What must differ between two options."""
    return ids[0] if scoring == "first_token" else " ".join(text.casefold().split())
