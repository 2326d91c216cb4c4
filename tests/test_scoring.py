"""Option probabilities equal a plain loop: one prompt + option at a time, one full forward each."""

import pytest
import torch

from calm_lightning import scoring
from calm_lightning.backbone import Backbone
from calm_lightning.head import Alpha
from calm_lightning.scoring import option_log_probs, probabilities


class Body(Backbone):
    """The real backbone, counting its forwards and the rows of logits it holds at once."""

    forwards = 0

    def __init__(self, lm):
        self.logit_rows: list[int] = []
        super().__init__(lm.requires_grad_(False), trained=False)
        self.forwards = 0  # the constructor looks at the model once
        self.logit_rows.clear()

    def hidden(self, *args, **kwargs):
        self.forwards += 1
        return super().hidden(*args, **kwargs)

    def logits(self, hidden):
        self.logit_rows.append(len(hidden))
        return super().logits(hidden)


def make_batch(way: str, shape: list[tuple[int, list[int]]]) -> dict:
    """Random ids: one question per (prompt length, [option lengths])."""
    generator = torch.Generator().manual_seed(1)

    def draw(n):
        return torch.randint(2, 300, (n,), generator=generator)

    return {
        "scoring": way,
        "prompt_ids": [draw(n) for n, _ in shape],
        "option_ids": [[draw(n) for n in lengths] for _, lengths in shape],
        "n_options": torch.tensor([len(lengths) for _, lengths in shape]),
    }


def naive(lm, batch, alpha) -> list[list[list[float]]]:
    """For each question and option, the log-probability of each of its tokens."""
    result = []
    for prompt, options in zip(batch["prompt_ids"], batch["option_ids"], strict=True):
        result.append([])
        for option in options:
            with torch.no_grad():
                z = lm(torch.cat([prompt, option])[None]).logits[0]
            if alpha is not None:
                z = alpha(z)
            log_p = z.log_softmax(-1)
            at = range(len(prompt) - 1, len(prompt) + len(option) - 1)
            result[-1].append([log_p[i, t].item() for i, t in zip(at, option, strict=True)])
    return result


@pytest.fixture
def alpha(tiny_lm):
    generator = torch.Generator().manual_seed(2)
    delta, l = torch.randn(2, tiny_lm.config.vocab_size, generator=generator)
    return lambda z: (1 + 0.3 * delta) * z + l


SINGLE = [(5, [1, 1, 1, 1]), (17, [1, 1]), (9, [1] * 5), (1, [1, 1, 1])]
LONG = [(5, [3, 1, 6, 2]), (17, [2, 4]), (9, [1, 1, 7, 2, 5]), (1, [4, 4, 2])]


@pytest.mark.parametrize(
    ("way", "shape"),
    [
        ("letter", SINGLE),
        ("first_token", SINGLE),
        ("text", SINGLE),
        ("text", LONG),
        ("text_mean", LONG),
    ],
)
@pytest.mark.parametrize("idle", [0, 32, 1000])
def test_equals_a_plain_loop(tiny_lm, alpha, way, shape, idle, monkeypatch):
    monkeypatch.setattr(scoring, "IDLE", idle)
    batch, body = make_batch(way, shape), Body(tiny_lm)
    found = option_log_probs(body, batch, {"theta": None, "both": alpha})
    # the longest option has seven tokens, so six to read: a pass each, in two passes, in one
    assert body.forwards == (1 if shape is SINGLE else 1 + {0: 6, 32: 2, 1000: 1}[idle])
    for name, adjustment in (("theta", None), ("both", alpha)):
        log_probs, mass = found[name]
        assert log_probs.dtype == torch.float32
        assert log_probs.shape == (4, 5)
        for q, options in enumerate(naive(tiny_lm, batch, adjustment)):
            sums = torch.tensor([sum(tokens) for tokens in options])
            wanted = sums
            if way == "text_mean":
                wanted = torch.tensor([sum(tokens) / len(tokens) for tokens in options])
            k = len(options)
            torch.testing.assert_close(log_probs[q, :k], wanted, atol=1e-4, rtol=1e-4)
            assert torch.isneginf(log_probs[q, k:]).all()
            torch.testing.assert_close(mass[q], sums.exp().sum(), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found["theta"][1], found["both"][1])


@pytest.mark.parametrize("shape", [SINGLE, LONG])
def test_padded_equals_unpadded(tiny_lm, shape):
    batch = make_batch("text", shape)
    together, _ = option_log_probs(Body(tiny_lm), batch, {"a": None})["a"]
    for q in range(len(shape)):
        alone = {"scoring": "text"} | {
            key: batch[key][q : q + 1] for key in ("prompt_ids", "option_ids", "n_options")
        }
        log_probs, _ = option_log_probs(Body(tiny_lm), alone, {"a": None})["a"]
        k = log_probs.shape[1]
        torch.testing.assert_close(together[q, :k], log_probs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [SINGLE, LONG])
def test_chunks_bound_the_logits_and_change_nothing(tiny_lm, alpha, monkeypatch, shape):
    batch = make_batch("text", shape)
    whole = option_log_probs(Body(tiny_lm), batch, {"a": alpha})["a"]
    monkeypatch.setattr(scoring, "CHUNK", 3)
    body = Body(tiny_lm)
    parts = option_log_probs(body, batch, {"a": alpha})["a"]
    assert max(body.logit_rows) <= 3
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


def test_zero_adjustment_is_no_adjustment(tiny_lm):
    zero = Alpha(tiny_lm.config.vocab_size)
    batch = make_batch("text", LONG)
    found = option_log_probs(Body(tiny_lm), batch, {"none": None, "zero": zero})
    assert torch.equal(found["none"][0], found["zero"][0])


def test_probabilities_are_zero_beyond_the_options(tiny_lm):
    log_probs, _ = option_log_probs(Body(tiny_lm), make_batch("letter", SINGLE), {"a": None})["a"]
    p = probabilities(log_probs)
    torch.testing.assert_close(p.sum(1), torch.ones(4))
    assert (p[0, 4:] == 0).all()
    assert (p[1, 2:] == 0).all()
    assert (p[1, :2] > 0).all()


def test_scoring_leaves_no_gradient(tiny_lm, alpha):
    log_probs, mass = option_log_probs(Body(tiny_lm), make_batch("text", LONG), {"a": alpha})["a"]
    assert not log_probs.requires_grad
    assert not mass.requires_grad
