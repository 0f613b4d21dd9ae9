"""Multi-token prediction against the layer of `transformers` and a loss written out with loops."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe_train.data.batch import Batch
from moe_train.hf.config import config_from_hf
from moe_train.hf.families import FAMILIES
from moe_train.hf.names import tensor_maps
from moe_train.hf.tensors import import_tensors
from moe_train.scale import StepScale
from moe_train.testing import small_model

transformers = pytest.importorskip("transformers", exc_type=ImportError)

VOCAB, FEATURES, DEPTHS, WEIGHT = 61, 24, 2, 0.3
DEEPSEEK = {
    "vocab_size": VOCAB,
    "hidden_size": FEATURES,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 14,
    "moe_intermediate_size": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 5,
    "num_nextn_predict_layers": 0,
}
NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}


class Theirs(torch.nn.Module):
    """DeepSeek-V3 of `transformers` with its layers of multi-token prediction, all of them trained."""

    def __init__(self):
        super().__init__()
        from transformers.modeling_layers import MtpLayer
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as module

        config = transformers.DeepseekV3Config(**DEEPSEEK, attn_implementation="eager", experts_implementation="eager")
        self.main = module.DeepseekV3ForCausalLM(config)
        layers = [
            MtpLayer(self.main.config, module.DeepseekV3DecoderLayer, module.DeepseekV3RMSNorm, 2 + depth)
            for depth in range(DEPTHS)
        ]
        self.mtp = torch.nn.ModuleList(layers)

    def named_for_file(self):
        """(name in a published file, tensor) of everything."""
        for name, tensor in self.main.state_dict(keep_vars=True).items():
            yield name, tensor
        for depth, layer in enumerate(self.mtp):
            for name, tensor in layer.state_dict(keep_vars=True).items():
                short = {v: k for k, v in NAMES.items()}.get(name.rpartition(".")[0])
                inside = f"{short}.weight" if short else name.removeprefix("mtp_block.")
                yield f"model.layers.{2 + depth}.{inside}", tensor

    def losses(self, document):
        """(cross-entropies of the next token, those of each depth) of one document, target by target."""
        tokens = torch.tensor([document])
        base, size = self.main.model, len(document)
        hidden = base(tokens, use_cache=False).last_hidden_state
        nats = [self.nats(hidden, document, 1)]
        for depth, layer in enumerate(self.mtp):
            ahead = torch.tensor([[document[t + depth + 1] if t + depth + 1 < size else 0 for t in range(size)]])
            position = torch.arange(size)[None]
            hidden = layer(
                inputs_embeds=base.embed_tokens(ahead),
                previous_hidden_state=hidden,
                position_embeddings=base.rotary_emb(hidden, position),
                attention_mask=torch.full((size, size), -torch.inf).triu(1)[None, None],
                position_ids=position,
                cache=None,
            )
            nats.append(self.nats(hidden, document, depth + 2))
        return nats

    def nats(self, hidden, document, distance):
        logits = self.main.lm_head(hidden)[0]
        targets = [(t, document[t + distance]) for t in range(len(document) - distance)]
        return [F.cross_entropy(logits[t], torch.tensor(target)) for t, target in targets]


@pytest.fixture
def pair():
    theirs = Theirs()
    with torch.no_grad():
        for _, tensor in theirs.named_for_file():
            values = torch.randn(tensor.shape)
            tensor.copy_(1 + 0.3 * values if tensor.dim() == 1 else values * 1.2 / tensor.shape[-1] ** 0.5)
        theirs.main.model.embed_tokens.weight.normal_()
    hf = theirs.main.config.to_dict() | {"num_nextn_predict_layers": DEPTHS, "num_mtp_layers": DEPTHS}
    config = replace(config_from_hf(hf), mtp_weight=WEIGHT)
    model = small_model(config, VOCAB, torch.float32)
    import_tensors(model, config, FAMILIES["deepseek_v3"].names, dict(theirs.named_for_file()))
    return model, config, theirs


def packed(documents, slots):
    """One row; every token is an input, and the next one of its document its target."""
    inputs = [token for document in documents for token in document]
    targets = [token for document in documents for token in [*document[1:], 0]]
    numbers = [number for number, document in enumerate(documents) for _ in document]
    pad = slots - len(inputs)
    row = [
        torch.tensor([values + [fill] * pad]) for values, fill in ((inputs, 0), (targets, 0), (numbers, len(documents)))
    ]
    return row[0], row[1], torch.arange(slots)[None] < len(inputs), row[2]


def test_r086_losses_and_every_gradient_equal_a_reference_written_out(pair):
    model, config, theirs = pair
    documents = [torch.randint(0, VOCAB, (n,)).tolist() for n in (6, 2, 9, 3)]
    nats = [theirs.losses(document) for document in documents]
    sums = [[value for each in nats for value in each[distance]] for distance in range(DEPTHS + 1)]
    means = [torch.stack(values).mean() for values in sums]
    (means[0] + WEIGHT * sum(means[1:]) / DEPTHS).backward()

    token_BS, target_BS, valid_BS, document_BS = packed(documents, 24)
    mask_BS = torch.ones_like(valid_BS)
    batch = Batch.from_rows(token_BS, target_BS, valid_BS, mask_BS, document_BS=document_BS)
    scale = StepScale.count([batch], balance_sequences=1, loss_norm="token", depths=DEPTHS)
    assert [scale.targets.targets, *(count.targets for count in scale.ahead)] == [len(values) for values in sums]
    weights = scale.microbatch(batch, torch.float32)
    context = model.context(batch.sequence_info(), weights)
    x = token_BS
    for segment in model.segments():
        x = segment.run(x, context)
    loss = (F.cross_entropy(x, batch.target_BS.flatten(), reduction="none") * weights.target_weight_T).sum()
    loss.backward()
    assert loss.item() == pytest.approx(means[0].item(), abs=1e-5)
    assert context.losses["mtp"].item() == pytest.approx(sum(means[1:]).item() / DEPTHS, abs=1e-5)
    assert len(context.statistics) == len(model.routers()) == 1 + DEPTHS

    found, parameters = {}, dict(model.named_parameters())
    for tensor in tensor_maps(FAMILIES["deepseek_v3"].names, config, parameters, "stacked"):
        found |= tensor.to_theirs(parameters[tensor.ours].grad, config)
    expected = {name: tensor for name, tensor in theirs.named_for_file() if tensor.requires_grad}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        assert float((found[name] - grad).norm()) <= 1e-4 * float(grad.norm()) + 1e-6, name


def test_evaluation_leaves_the_further_depths_out(pair):
    model, _, _ = pair
    token_BS = torch.randint(0, VOCAB, (2, 5))
    batch = Batch.from_rows(token_BS, token_BS, torch.ones(2, 5, dtype=torch.bool))
    output = model(token_BS, batch.sequence_info())
    assert output.statistics.counts.shape == (1, 8)
    scale = StepScale.count([batch], balance_sequences=1, loss_norm="token", depths=DEPTHS)
    trained = model(token_BS, batch.sequence_info(), scale.microbatch(batch, torch.float32))
    assert torch.equal(trained.logits_BSV, output.logits_BSV)


def test_every_parameter_belongs_to_one_segment(pair):
    model, _, _ = pair
    names = [name for segment in model.segments() for name in segment.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    first = {segment.name: segment.parameters for segment in model.segments()}
    assert "head.weight" in first["mtp.0"]
    assert first["head"] == ()
