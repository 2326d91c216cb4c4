"""The world behind `known_truth`: cues with evidence, three domains, and a Llama aligned to it.

A prompt is a handful of cues, its answer one word, and p(y|x) the softmax of the cues' summed
evidence, the same in every domain. Domains differ in which cues are frequent: the source's are
strong and its prompts long, those of `target` and `other` are weaker and shorter.
"""

from copy import deepcopy
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CUES, ANSWERS = 64, 16
FRAME = ["<unk>", "<s>", "</s>", "Question:", "Answer:"]
ANSWER, CUE = len(FRAME), len(FRAME) + ANSWERS  # ids of the first answer and of the first cue
WORDS = [*FRAME, *(f"answer{i}" for i in range(ANSWERS)), *(f"cue{i}" for i in range(CUES))]
STRONGEST, WEAKEST = 1.4, 0.5  # standard deviation of the first and the last cue's evidence, nats
BATCH, PRETRAINING, ALIGNMENT = 64, 500, 100  # rows a step, steps
SHIFTED = ("target", "other")


class Domain(NamedTuple):
    """Which cues are frequent, how long prompts are, how many rows are written."""

    tilt: float  # cue i comes up in proportion to exp(tilt * i / CUES)
    shortest: int
    longest: int
    rows: int


DOMAINS = {
    "source": Domain(-3.0, 6, 12, 4000),
    "target": Domain(3.0, 5, 9, 1500),
    "other": Domain(1.5, 3, 6, 1500),
}


class World:
    """The evidence of every cue (CUES, ANSWERS), and the dice for all that is drawn."""

    def __init__(self, seed: int):
        self.dice = torch.Generator().manual_seed(seed)
        strength = torch.linspace(STRONGEST, WEAKEST, CUES)
        self.evidence = strength[:, None] * torch.randn(CUES, ANSWERS, generator=self.dice)

    def truth(self, prompts: Tensor) -> Tensor:
        """p(y|x), (N, ANSWERS), of prompts (N, L)."""
        return self.evidence[prompts].sum(1).softmax(-1)

    def prompts(self, name: str, n: int) -> Tensor:
        """Draw n prompts of one length from a domain, (n, L)."""
        domain = DOMAINS[name]
        length = torch.randint(domain.shortest, domain.longest + 1, (), generator=self.dice)
        frequency = (domain.tilt * torch.arange(CUES) / CUES).exp().expand(n, -1)
        return frequency.multinomial(int(length), replacement=True, generator=self.dice)

    def answers(self, p: Tensor) -> Tensor:
        """Draw an answer from each row of p, (N,)."""
        return p.multinomial(1, generator=self.dice)[:, 0]

    def rows(self, name: str) -> tuple[list[str], Tensor]:
        """Draw a domain's rows, no two alike: their text, and p(y|x) (N, ANSWERS)."""
        found: dict[str, Tensor] = {}
        while len(found) < DOMAINS[name].rows:
            prompt = self.prompts(name, 1)
            found[" ".join(f"cue{i}" for i in prompt[0].tolist())] = self.truth(prompt)
        return list(found), torch.cat(list(found.values()))

    def aligned_lm(self) -> LlamaForCausalLM:
        """Train a two-layer Llama that is calibrated on the source and too sure elsewhere.

        It first reads sampled answers, three in four from the source. Alignment then teaches it, on
        shifted prompts, the answer that it prefers itself, while it goes on reading true answers of
        the source: no more right than before, surer, and hardly so where temperature is fitted.
        """
        lm = _random_lm(int(torch.randint(2**31, (), generator=self.dice)))
        optimizer = torch.optim.AdamW(lm.parameters())
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=PRETRAINING)
        for step in range(PRETRAINING):
            prompts = self.prompts("source" if step % 4 else SHIFTED[step // 4 % 2], BATCH)
            _learn(lm, optimizer, prompts, self.answers(self.truth(prompts)))
            rates.step()

        pretrained = deepcopy(lm)  # frozen: a preference that is reinforced as it moves collapses
        optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3)
        for step in range(ALIGNMENT):
            name = "source" if step % 2 else SHIFTED[step // 2 % 2]
            prompts = self.prompts(name, BATCH)
            if name == "source":
                answers = self.answers(self.truth(prompts))
            else:
                with torch.no_grad():
                    answers = _logits(pretrained, token_ids(prompts))[:, 0, ANSWER:CUE].argmax(-1)
            _learn(lm, optimizer, prompts, answers)
        return lm.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, <s> in front."""
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", FRAME.index("<s>"))]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def token_ids(prompts: Tensor, answers: Tensor | int = 0) -> Tensor:
    """Ids (N, L + 5) of "<s> Question: {cues} Answer: {answer} </s>", without any text."""
    bos, eos, question, answer = map(FRAME.index, ("<s>", "</s>", "Question:", "Answer:"))
    ids = torch.empty(len(prompts), prompts.shape[1] + 5, dtype=torch.long)
    ids[:, 0], ids[:, 1], ids[:, -3], ids[:, -1] = bos, question, answer, eos
    ids[:, 2:-3], ids[:, -2] = CUE + prompts, ANSWER + answers
    return ids


def _random_lm(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=FRAME.index("<s>"),
        eos_token_id=FRAME.index("</s>"),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _logits(lm: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Logits (N, 2, V) that predict the answer and its EOS."""
    hidden = lm.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return lm.lm_head(hidden[:, -2:])


def _learn(lm: LlamaForCausalLM, optimizer, prompts: Tensor, answers: Tensor) -> None:
    ids = token_ids(prompts, answers)
    cross_entropy(_logits(lm, ids).flatten(0, 1), ids[:, -2:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
