"""Models that people train, in tiny configurations: what of each stays without a gradient in a common use of it, and why.

The truth comes from the libraries' sources; which parameters have no gradient is besides compared with `.grad`.
"""

from __future__ import annotations

import copy
import linecache
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpcov
from ddpcov.report import Finding
from multirank import run_ranks

TOKENS = torch.arange(3, 15).reshape(2, 6)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
SOUND = torch.sin(torch.arange(800.0)).reshape(2, 400)
X = torch.linspace(-1, 1, 12).reshape(4, 3)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {**SIZES, "vocab_size": 32}
LLAMA = {**SIZES, "vocab_size": 32, "num_key_value_heads": 2}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}
GPT2 = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
WAV2VEC2 = {
    **SIZES,
    "vocab_size": 8,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.5,
    "mask_time_length": 2,
    "layerdrop": 0.0,
}
BART = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Missed(NamedTuple):
    """What is missed for one cause: name patterns, something that the finding says, and what stands in the line it names."""

    code: str
    names: str
    says: str = ""
    line: str = ""


class Case(NamedTuple):
    """A model, a loss, and all that is missed."""

    build: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor]
    missed: tuple[Missed, ...] = ()


def made(name: str, config: dict[str, Any], **options: Any) -> Any:
    """A model of transformers, in training."""
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**config), **options).train()


class Wrapping(nn.Module):
    """A user's model over a library's."""

    def __init__(self, inner: nn.Module, has_grad: bool = True) -> None:
        super().__init__()
        self.inner, self.head, self.has_grad = inner, nn.Linear(16, 2), has_grad

    def forward(self, x: torch.Tensor) -> Any:
        with torch.set_grad_enabled(self.has_grad):
            hidden = self.inner(x).last_hidden_state
        return self.head(hidden)


class Quantized(nn.Module):
    """A VQ-VAE with a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(3, 3), nn.Embedding(5, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        code = self.codebook(torch.cdist(z, self.codebook.weight).argmin(-1))
        return self.decoder(z + (code - z).detach()), F.mse_loss(code, z.detach())


class Student(nn.Module):
    """Learns from a copy of itself that is averaged, not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 3)
        self.teacher = copy.deepcopy(self.student)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x) + 1
        return F.mse_loss(self.student(x), target)


def checkpointed(use_reentrant: bool) -> Any:
    """Llama in checkpoints, which nothing that needs a gradient is given: the embeddings are frozen, or passed by."""
    model = made("LlamaForCausalLM", LLAMA)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    model.get_input_embeddings().requires_grad_(False)
    return model


def adapted(base: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))


def twice_adapted() -> Any:
    """Two adapters, both trainable, one active."""
    model = adapted(made("LlamaForCausalLM", LLAMA))
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def mixtral() -> Any:
    model = made("MixtralForCausalLM", {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 1})
    if not any(name.endswith("experts.down_proj") for name, _ in model.named_parameters()):
        pytest.skip("this version of transformers keeps a module for each expert")
    return model


def switch_transformer() -> Any:
    sparse = {"num_experts": 8, "expert_capacity": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    return made("SwitchTransformersForConditionalGeneration", {**T5, **sparse})


def clip() -> Any:
    text = {**SIZES, "vocab_size": 32, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2}
    return made("CLIPModel", {"text_config": text, "vision_config": IMAGE, "projection_dim": 8})


def detr() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    queries = {"num_queries": 4, "num_labels": 3, "backbone_config": backbone, "use_timm_backbone": False}
    return made("DetrForObjectDetection", {**BART, **queries, "use_pretrained_backbone": False, "backbone": None})


def hidden(*args: Any, **options: Any) -> Callable[[Any], torch.Tensor]:
    return lambda m: m(*args, **options).last_hidden_state.sum()


def labelled(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def embedded(model: Any) -> torch.Tensor:
    return model(inputs_embeds=torch.ones(2, 6, 16), labels=TOKENS).loss


def on_two_tokens(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS[:1, :2], labels=TOKENS[:1, :2]).loss


def of_both_outputs(model: Quantized) -> torch.Tensor:
    out, commitment = model(X)
    return F.mse_loss(out, X) + commitment


CASES = {
    # Text.
    "bert without its pooler": Case(
        lambda: made("BertModel", BERT), hidden(TOKENS), (Missed("DDC105", "pooler.*", says="output .pooler_output"),)
    ),
    "bert in a user's model": Case(
        lambda: Wrapping(made("BertModel", BERT)),
        lambda m: m(TOKENS).sum(),
        (Missed("DDC106", "inner.pooler.*", says="reaches no output of the forward", line="self.inner(x)"),),
    ),
    "bert pretrained on masks only": Case(
        lambda: made("BertForPreTraining", BERT),
        lambda m: m(TOKENS).prediction_logits.sum(),
        (Missed("DDC105", "bert.pooler.* cls.seq_relationship.*", says="output .seq_relationship_logits"),),
    ),
    "bert for masked tokens": Case(lambda: made("BertForMaskedLM", BERT), labelled),
    "bert for sequences": Case(lambda: made("BertForSequenceClassification", BERT), lambda m: m(TOKENS).logits.sum()),
    "gpt2 with its tied head": Case(lambda: made("GPT2LMHeadModel", GPT2), labelled),
    "gpt2 over embeddings of one's own": Case(
        lambda: made("GPT2Model", GPT2),
        hidden(inputs_embeds=torch.ones(2, 6, 16)),
        (Missed("DDC101", "wte.weight", says="`inputs_embeds is None`"),),
    ),
    "t5": Case(lambda: made("T5ForConditionalGeneration", T5), labelled),
    "t5's encoder model": Case(lambda: made("T5EncoderModel", T5), hidden(TOKENS)),
    "t5 of which the encoder is called": Case(
        lambda: made("T5Model", T5),
        lambda m: m.encoder(TOKENS).last_hidden_state.sum(),
        (Missed("DDC101", "decoder.*", line="m.encoder"),),
    ),
    "bart": Case(lambda: made("BartForConditionalGeneration", BART), labelled),
    "bart of which the encoder is called": Case(
        lambda: made("BartModel", BART),
        lambda m: m.encoder(TOKENS).last_hidden_state.sum(),
        (Missed("DDC101", "decoder.*", line="m.encoder"),),
    ),
    # Experts.
    "mixtral, its experts fused": Case(mixtral, on_two_tokens),
    "more experts than tokens": Case(
        switch_transformer, on_two_tokens, (Missed("DDC101", "*.mlp.experts.*", says="(SwitchTransformersDenseActDense)"),)
    ),
    # Checkpoints and adapters.
    "llama in checkpoints": Case(lambda: checkpointed(use_reentrant=False), embedded),
    "llama in reentrant checkpoints": Case(
        lambda: checkpointed(use_reentrant=True),
        embedded,
        (Missed("DDC110", "model.layers.*", says="use_reentrant=False", line="inputs_embeds"),),
    ),
    "lora": Case(lambda: adapted(made("LlamaForCausalLM", LLAMA)), labelled),
    "lora in reentrant checkpoints": Case(
        lambda: adapted(checkpointed(use_reentrant=True), modules_to_save=["lm_head"]),
        embedded,
        (Missed("DDC110", "*.lora_?.*", says="enable_input_require_grads()"),),
    ),
    "modules to save": Case(lambda: adapted(made("LlamaForCausalLM", LLAMA), modules_to_save=["lm_head"]), labelled),
    "modules to save, all of it thawed": Case(
        lambda: adapted(made("LlamaForCausalLM", LLAMA), modules_to_save=["lm_head"]).requires_grad_(True),
        labelled,
        (Missed("DDC101", "*.lm_head.original_module.weight", says="of equal values, ran"),),
    ),
    "an adapter that is not active": Case(twice_adapted, labelled, (Missed("DDC101", "*.lora_?.other.weight"),)),
    # Images.
    "clip": Case(clip, lambda m: m(input_ids=TOKENS, pixel_values=IMAGES, return_loss=True).loss),
    "clip's images up to the last block": Case(
        lambda: made("CLIPVisionModel", IMAGE),
        lambda m: m(IMAGES, output_hidden_states=True).hidden_states[-2].sum(),
        (Missed("DDC105", "*encoder.layers.1.* *post_layernorm.*", says=".pooler_output", line="hidden_states[-2]"),),
    ),
    "clip's images under no_grad": Case(
        lambda: Wrapping(made("CLIPVisionModel", IMAGE), has_grad=False),
        lambda m: m(IMAGES).sum(),
        (Missed("DDC103", "inner.*", says="inner was called", line="self.inner(x)"),),
    ),
    "vit with a mask token": Case(
        lambda: made("ViTModel", IMAGE, use_mask_token=True, add_pooling_layer=False),
        hidden(IMAGES),
        (Missed("DDC102", "embeddings.mask_token", says="mentions it in "),),
    ),
    "vit that masks": Case(
        lambda: made("ViTModel", IMAGE, use_mask_token=True, add_pooling_layer=False),
        hidden(IMAGES, bool_masked_pos=torch.tensor([[True, False, False, True]] * 2)),
    ),
    "dinov2 in a user's model": Case(
        lambda: Wrapping(made("Dinov2Model", {k: v for k, v in IMAGE.items() if k != "intermediate_size"})),
        lambda m: m(IMAGES).sum(),
        (Missed("DDC102", "inner.embeddings.mask_token", line="self.inner(x)"),),
    ),
    "deit without its teacher": Case(
        lambda: made("DeiTForImageClassificationWithTeacher", {**IMAGE, "num_labels": 2}),
        lambda m: m(IMAGES).cls_logits.sum(),
        (Missed("DDC105", "distillation_classifier.*", says=".distillation_logits"),),
    ),
    "detr": Case(detr, lambda m: sum(out.sum() for out in (m(IMAGES)[key] for key in ("logits", "pred_boxes")))),
    "detr for classes only": Case(
        detr, lambda m: m(IMAGES).logits.sum(), (Missed("DDC105", "bbox_predictor.*", says="output .pred_boxes"),)
    ),
    # Sound.
    "wav2vec2 that masks": Case(lambda: made("Wav2Vec2Model", WAV2VEC2), hidden(SOUND)),
    "wav2vec2 in eval mode": Case(
        lambda: made("Wav2Vec2Model", WAV2VEC2).eval(), hidden(SOUND), (Missed("DDC102", "masked_spec_embed"),)
    ),
    "wav2vec2 that drops every layer": Case(
        lambda: made("Wav2Vec2Model", {**WAV2VEC2, "layerdrop": 1.0}),
        hidden(SOUND),
        (Missed("DDC101", "encoder.layers.*", says="mentions 'layers'"),),
    ),
    "whisper of which the encoder is called": Case(
        lambda: made("WhisperModel", WHISPER),
        lambda m: m.encoder(torch.ones(2, 8, 20)).last_hidden_state.sum(),
        (Missed("DDC101", "decoder.*", says="decoder (WhisperDecoder) never ran", line="m.encoder"),),
    ),
    # Models as people write them.
    "vq-vae": Case(Quantized, of_both_outputs),
    "vq-vae without its codebook loss": Case(
        Quantized, lambda m: m(X)[0].sum(), (Missed("DDC105", "codebook.weight", says="output [1]"),)
    ),
    "averaged teacher": Case(
        Student, lambda m: m(X), (Missed("DDC103", "teacher.*", says="teacher was called", line="self.teacher(x)"),)
    ),
}


def check(findings: tuple[Finding, ...], expected: tuple[Missed, ...], model: nn.Module, missing: set[str]) -> None:
    """Each parameter that is missing has its cause, once; and nothing else is found."""
    assert sorted(name for f in findings for name in f.parameters) == sorted(missing), findings
    assert {f.code for f in findings} == {one.code for one in expected}, findings
    for one in expected:
        ours = [f for f in findings if f.code == one.code]
        assert {n for n in missing if matches(n, one.names)} == {n for f in ours for n in f.parameters}
        assert all(not one.says or one.says in f"{f.message} {f.evidence} {f.fix}" for f in ours), ours
        for f in ours:
            assert f.where is not None and Path(f.where.file).name == Path(__file__).name, f.where
            assert one.line in linecache.getline(__file__, f.where.line), f.where
            assert frozen_by(f.fix, model) in (None, set(f.parameters)), f.fix


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split())


def frozen_by(fix: str, model: nn.Module) -> set[str] | None:
    """What the advice freezes, if it says how, of what is trained."""
    found = re.search(r"freeze it(?:, before the model is wrapped)?: (.+)", fix)
    if found is None:
        return None
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    exec(found[1], {"model": model})
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    for name in trained:
        model.get_parameter(name).requires_grad_(True)
    return trained - left


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_cause(name):
    torch.manual_seed(0)
    build, loss, expected = CASES[name]
    model = build()
    with ddpcov.track(model) as cov:
        loss(model).backward()
    missing = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert bool(missing) == bool(expected)
    check(cov.report().findings, expected, model, missing)


def train_two_ranks(rank: int) -> None:
    model = DDP(made("BertModel", BERT), find_unused_parameters=True)
    with ddpcov.track(model, out="run.bin"):
        for _ in range(2):
            model(TOKENS).last_hidden_state.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_bert_without_its_pooler_under_ddp(tmp_path):
    assert [rank.code for rank in run_ranks(train_two_ranks, folder=tmp_path, time_limit=120)] == [0, 0]
    report = ddpcov.read(tmp_path / "run.bin")
    pooler = {"pooler.dense.weight", "pooler.dense.bias"}
    check(report.findings, (Missed("DDC105", "pooler.*", line=".last_hidden_state"),), made("BertModel", BERT), pooler)
    assert [(f.ranks, f.steps) for f in report.findings] == [((0, 1), ((0, 1),))]


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": TOKENS[index % 2]}


class Trained(Wrapping):
    """As the Trainer of transformers wants it."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).pow(2).mean()}


@pytest.mark.filterwarnings("ignore")
def test_trainer_of_transformers(tmp_path):
    model = Trained(made("BertModel", BERT))
    once = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 1, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(tmp_path, **once, use_cpu=True, report_to=[], disable_tqdm=True)
    with ddpcov.track(model) as cov:
        transformers.Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
    report = cov.report()
    assert (report.run.steps, report.run.backward_passes) == (2, 4)
    pooler = {"inner.pooler.dense.weight", "inner.pooler.dense.bias"}
    check(report.findings, (Missed("DDC106", "inner.pooler.*", line="self.inner(x)"),), model, pooler)


@pytest.mark.filterwarnings("ignore")
def test_trainer_of_lightning():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(16, 2), nn.Linear(16, 2)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.used(batch["x"].float().repeat(1, 3)[:, :16]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    model = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet)
    with ddpcov.track(model) as cov:
        trainer.fit(model, torch.utils.data.DataLoader(Sentences(), batch_size=2))
    assert cov.report().run.steps == 2
    check(cov.report().findings, (Missed("DDC101", "spare.*", line="self.used("),), model, {"spare.weight", "spare.bias"})
