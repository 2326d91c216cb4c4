"""Loading, splitting and restoring a language model."""

import copy

import pytest
import torch
from conftest import needs_smollm2, smollm2_gguf
from peft import LoraConfig
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from calm_lightning.backbone import Backbone, load_lm, load_tokenizer, resolve, with_lora


def lora():
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.2)


def test_body_and_output_layer_are_the_model(tiny_lm):
    ids = torch.randint(0, 300, (2, 7))
    mask = torch.ones_like(ids)
    wanted = tiny_lm(input_ids=ids, attention_mask=mask).logits
    backbone = Backbone(with_lora(tiny_lm, lora()).eval())
    hidden, cache = backbone.hidden(ids, mask)
    assert cache is None
    torch.testing.assert_close(backbone.logits(hidden), wanted)  # B of LoRA is 0 at the start
    assert backbone.vocab_size == 384
    names = [name for name, p in backbone.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name and "lm_head" not in name for name in names)
    assert len(dict(backbone.named_parameters())) == len(dict(backbone.lm.named_parameters()))


@pytest.mark.parametrize("adapters", [True, False])
def test_theta_0_is_found_again_and_theta_k_restored(adapters, tiny_lm):
    tiny_lm.get_output_embeddings().requires_grad_(False)
    backbone = Backbone(with_lora(tiny_lm, lora() if adapters else None).eval())
    ids, mask = torch.arange(6)[None], torch.ones(1, 6, dtype=torch.long)
    first = backbone.hidden(ids, mask)[0].detach()
    with torch.no_grad():
        for p in backbone.theta():
            p.add_(0.1)
    moved = backbone.hidden(ids, mask)[0].detach()
    assert not torch.allclose(first, moved)
    with backbone.at_theta_0():
        torch.testing.assert_close(backbone.hidden(ids, mask)[0], first)
    assert torch.equal(backbone.hidden(ids, mask)[0], moved)


def test_adapters_of_the_user_belong_to_the_start(tiny_lm):
    lm = with_lora(tiny_lm, lora()).eval()
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if "lora_B" in name:
                p.normal_()
    backbone = Backbone(lm)
    ids, mask = torch.arange(6)[None], torch.ones(1, 6, dtype=torch.long)
    first = backbone.hidden(ids, mask)[0]
    with backbone.at_theta_0():
        assert torch.equal(backbone.hidden(ids, mask)[0], first)


def test_without_dropout_touches_dropout_alone(tiny_lm):
    backbone = Backbone(with_lora(tiny_lm, lora()).train())
    before = [m.training for m in backbone.lm.modules()]
    with backbone.without_dropout():
        for m in backbone.lm.modules():
            assert m.training == (not isinstance(m, torch.nn.Dropout))
    assert [m.training for m in backbone.lm.modules()] == before


class Softcapped(LlamaForCausalLM):
    """A model whose logits are not output_layer(hidden)."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = torch.tanh(out.logits)
        return out


def test_models_that_cannot_be_split_or_trained_are_refused(tiny_lm):
    frozen = copy.deepcopy(tiny_lm).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        Backbone(frozen)
    assert Backbone(frozen, trained=False).theta() == []
    with pytest.raises(ValueError, match=r"output layer .* is trainable"):
        Backbone(tiny_lm)
    with pytest.raises(ValueError, match="no output layer"):
        Backbone(tiny_lm.model)
    opt = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        word_embed_proj_dim=16, dropout=0.5,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"no nn\.Dropout module"):
        Backbone(with_lora(OPTForCausalLM(opt), lora()))
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.5,
    )  # fmt: skip
    capped = Softcapped(config)
    capped.get_output_embeddings().requires_grad_(False)
    with pytest.raises(ValueError, match="soft-capped"):
        Backbone(capped)


def test_nf4_trains_adapters_only_and_needs_them(tiny_model_dir):
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    lm = load_lm(str(tiny_model_dir), quantization=nf4)
    with pytest.raises(ValueError, match=r"give model\.lora"):
        with_lora(lm, None)
    backbone = Backbone(with_lora(lm, lora()).train())
    assert all(p.dtype == torch.float32 for p in backbone.theta())
    repacks = [m.support_avx512bf16_for_cpu for m in lm.modules()
               if hasattr(m, "support_avx512bf16_for_cpu")]  # fmt: skip
    assert repacks
    assert not any(repacks)
    hidden, _ = backbone.hidden(torch.arange(6)[None], torch.ones(1, 6, dtype=torch.long))
    grads = torch.autograd.grad(hidden.float().pow(2).sum(), backbone.theta())
    assert sum(g.abs().sum() for g in grads) > 0


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_path_without_a_model(name):
    with pytest.raises(FileNotFoundError, match=r"no model at .*--model\.model_name"):
        resolve(name)


def test_folders_and_files_that_are_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json and 0 GGUF files"):
        resolve(str(tmp_path))
    (tmp_path / "a.bin").write_text("")
    with pytest.raises(FileNotFoundError, match=r"no \.gguf file"):
        resolve(str(tmp_path / "a.bin"))
    assert resolve("someone/some-model") == "someone/some-model"


@needs_smollm2
def test_gguf_is_converted_once_and_read_as_the_aligned_model(tmp_path, monkeypatch, capsys):
    path = str(smollm2_gguf())
    folder = resolve(path)
    capsys.readouterr()
    assert resolve(path) == folder  # from the cache now
    assert resolve(str(smollm2_gguf().parent)) == folder
    assert "converting" not in capsys.readouterr().err
    lm, tokenizer = load_lm(path), load_tokenizer(path)
    ids = tokenizer("Question: What is the capital of France?\nAnswer:", return_tensors="pt")
    with torch.no_grad():
        logits = lm(**ids).logits[0, -1]
    capitals = [" Paris", " Rome", " London", " Oslo"]
    scores = [logits[tokenizer.encode(capital)[0]].item() for capital in capitals]
    assert scores[0] == max(scores)
    assert lm.get_output_embeddings().weight.shape == (49152, 576)
