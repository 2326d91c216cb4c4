"""A CALM run beside TRL's SFTTrainer on the same source rows: time and memory.

    python benchmarks/sft_peer.py --root DATA --model PATH     (pip install -e ".[bench]")

K outer iterations read K (T + 2) micro-batches; SFTTrainer makes one update on each, and so does
our own fine-tuning. Each in a process of its own, one thread: processor seconds of the training
alone, and how far the peak resident size rises above its level before.
"""

import argparse
import resource
import tempfile
import time
from multiprocessing import get_context

import torch
from datasets import Dataset
from peft import LoraConfig
from real_data import B, K, T, build, trainer

from calm_lightning import AlpacaDataModule, CALMModule, FineTuning
from calm_lightning.backbone import load_lm, load_tokenizer

WAYS = ("TRL SFTTrainer", "our fine-tuning", "CALM")


def source(args) -> AlpacaDataModule:
    """The rows of the real-data check."""
    return AlpacaDataModule(
        root=args.root, form="question", max_chars_prompt=120, max_chars_response=150,
        max_length=128, batch_size=B, inner_steps=T, outer_steps_per_epoch=K, by_length=False,
        tokenizer=load_tokenizer(args.model),
    )  # fmt: skip


def rows(args) -> list[dict]:
    """Those that the train items hold, one by one."""
    data = source(args)
    data.setup("fit")
    found = []
    for k in range(K):
        item = data.train_dataloader()[k]
        for batch in (*item["train"], item["calib"]):
            for ids, mask, labels in zip(*batch.values(), strict=True):
                n = int(mask.sum())
                response = (labels[:n] != -100).long()
                found.append({"input_ids": ids[:n].tolist(), "completion_mask": response.tolist()})
    return found


def peer(args, folder: str):
    """An SFTTrainer on these rows."""
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        folder, per_device_train_batch_size=B, num_train_epochs=1, learning_rate=1e-3,
        report_to="none", save_strategy="no", use_cpu=True, completion_only_loss=True,
        gradient_checkpointing=False, bf16=False, max_length=None, disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return SFTTrainer(
        load_lm(args.model, dtype="float32"), config, train_dataset=Dataset.from_list(rows(args)),
        processing_class=load_tokenizer(args.model), peft_config=lora,
    )  # fmt: skip


def run(args, way: str) -> tuple[float, float]:
    """Seconds, MiB."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if way == WAYS[0]:
            train = peer(args, folder).train
        else:
            options = {"use": "all"} if way == WAYS[1] else {}
            module = build(FineTuning if way == WAYS[1] else CALMModule, args.model, options)
            module.configure_model()
            data = source(args)
            train = lambda: trainer().fit(module, data)  # noqa: E731
        with open("/proc/self/statm") as file:
            before = int(file.read().split()[1]) * resource.getpagesize()
        began = time.process_time()
        train()
        seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, (peak - before) / 2**20


def main(args) -> None:
    """A row a way."""
    print(
        "| | processor s | × TRL | MiB above the level before | × TRL |\n|---|---:|---:|---:|---:|"
    )
    first = None
    for way in WAYS:
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            seconds, mib = pool.apply(run, (args, way))
        first = first or (seconds, mib)
        print(f"| {way} | {seconds:.0f} | {seconds / first[0]:.2f} "
              f"| {mib:.0f} | {mib / first[1]:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--root", help="folder with alpaca/ instead of the hub")
    main(parser.parse_args())
