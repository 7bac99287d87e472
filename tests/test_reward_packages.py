"""TRL and sentence-transformers read a Hydra as the reward model and reranker that they know."""

import pytest
import torch
from datasets import Dataset
from transformers import BertTokenizer, LlamaConfig, LlamaForCausalLM

from hydra_transformers import AutoHydra
from tests.test_regression_end_to_end import backbone
from tests.tiny_data import WORDS


pytestmark = pytest.mark.slow
QUIET = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}


def tokenizer(**settings) -> BertTokenizer:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    return BertTokenizer(vocab=vocabulary, eos_token="[SEP]", **settings)


@pytest.fixture
def hydra():
    model = AutoHydra.from_pruned_members([backbone(seed) for seed in range(3)], shared=()).eval()
    model.config.aggregate = "mean-2std"
    return model


def test_trl_trains_a_member_on_preferences(hydra, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install hydra_transformers[rewards]")
    member = hydra.member(1)
    pairs = Dataset.from_list([{"chosen": "a good film", "rejected": "a bad film"}] * 8)
    settings = trl.RewardConfig(tmp_path, max_steps=10, per_device_train_batch_size=4, learning_rate=1e-2, **QUIET)
    trainer = trl.RewardTrainer(member, settings, train_dataset=pairs, processing_class=tokenizer())
    batch = tokenizer()(["a good film", "a bad film"], return_tensors="pt")

    @torch.no_grad()
    def margin() -> float:
        good, bad = member.eval()(**batch).logits[:, 0].tolist()
        return good - bad

    before = margin()
    trainer.train()
    assert margin() > before + 0.5


def test_trl_takes_a_hydra_as_its_reward_model(hydra, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install hydra_transformers[rewards]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    policy = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, bos_token_id=2, eos_token_id=3, **sizes)
    )
    seen = []
    hydra.register_forward_hook(lambda module, args, kwargs, out: seen.append((kwargs, out.logits)), with_kwargs=True)
    settings = trl.GRPOConfig(
        tmp_path, max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=4, **QUIET
    )
    trainer = trl.GRPOTrainer(
        policy,
        reward_funcs=hydra,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "a good film"}] * 4),
        processing_class=tokenizer(padding_side="left"),
        reward_processing_classes=tokenizer(),
    )
    trainer.train()
    [(inputs, scores)] = seen
    with torch.no_grad():
        members = hydra(**inputs).member_logits
    assert torch.allclose(scores, members.mean(1) - 2 * members.std(1, correction=0), atol=1e-6)
    assert trainer.state.log_history[0]["reward"] == pytest.approx(scores.mean().item(), abs=1e-5)


def test_sentence_transformers_ranks_with_a_hydra(hydra, tmp_path):
    package = pytest.importorskip("sentence_transformers", reason="pip install hydra_transformers[rewards]")
    hydra.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    encoder = package.CrossEncoder(str(tmp_path), device="cpu")
    texts = ["good", "bad film of joy", "joy"]
    with torch.no_grad():
        scores = hydra(**tokenizer()(["a film"] * 3, texts, return_tensors="pt", padding=True)).logits[:, 0]
    ranked = encoder.rank("a film", texts)
    assert [each["corpus_id"] for each in ranked] == scores.argsort(descending=True).tolist()
    assert sorted(each["score"] for each in ranked) == pytest.approx(sorted(scores.sigmoid().tolist()), abs=1e-5)
