"""Parameters and FLOPs of a model, counted from its configuration. Imports nothing heavy."""

from dataclasses import dataclass
from math import prod

from moe_parallel.context.microbatches import SequenceWork
from moe_train.models.config import DecoderConfig

# What a device computes while a byte goes to its neighbour: 400 TF/s against 400 GB/s, about an H100 and NVLink.
EXCHANGE_FLOPS_PER_BYTE = 1000


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Counts that follow from the shapes.

    Attributes:
        parameters: all parameters.
        active_parameters: parameters that one token meets: all but the experts it did not choose.
        embedding_parameters: of the input embedding, which is looked up and not multiplied; 0 where it is tied.
        matmul_parameters: parameters that multiply one token in a matrix product, once for each product.
        attention_features: the sum over layers of heads * head_features, where a head of queries and keys is not as
            wide as one of values the mean of both.
        key_value_features: of the keys and values of one token, summed over layers.
    """

    parameters: int
    active_parameters: int
    embedding_parameters: int
    matmul_parameters: int
    attention_features: float
    key_value_features: int

    def flops_published(self, context_tokens: int) -> int:
        """Training FLOPs per token as published: 6 (active - input embedding) + 12 layers heads head_features context.

        No causal discount, none for a sliding window.
        """
        return 6 * (self.active_parameters - self.embedding_parameters) + self._attention(context_tokens)

    def flops_matmul(self, context_tokens: int) -> int:
        """Training FLOPs per token of the matrix products alone, attention over the whole context included.

        6 matmul_parameters + 12 layers heads head_features context, what torch's FLOP counter counts under the math
        attention backend.
        """
        return 6 * self.matmul_parameters + self._attention(context_tokens)

    def sequence_work(self) -> SequenceWork:
        """Training FLOPs of a sequence as they are done: a token sees itself and those before it, half on average.

        6 matmul_parameters per token, and 6 layers heads head_features per pair of tokens. Where ranks share a row,
        keys and values of its tokens go from each rank to the next, in the forward and in the backward, where their
        gradients in float32 go with them: 8 bytes of each feature in all.
        """
        return SequenceWork(
            linear=6 * self.matmul_parameters,
            quadratic=6 * self.attention_features,
            shared=8 * self.key_value_features * EXCHANGE_FLOPS_PER_BYTE,
        )

    def _attention(self, context_tokens: int) -> int:
        return int(12 * self.attention_features * context_tokens)


@dataclass
class _Sum:
    """Parameters of layers: all, those that one token meets, and those of them that are matrices of a product."""

    all: int = 0
    active: int = 0
    matmul: int = 0

    def matrix(self, *sizes: int, copies: int = 1, used: int = 1) -> None:
        """A matrix of this size; `used` of its `copies` multiply a token."""
        self.all += prod(sizes) * copies
        self.active += prod(sizes) * used
        self.matmul += prod(sizes) * used

    def vector(self, size: int) -> None:
        self.all += size
        self.active += size


def decoder_costs(config: DecoderConfig, vocab_size: int) -> ModelCosts:
    """Counts of the decoder, layers of multi-token prediction included."""
    width = config.model_features
    total = _Sum()
    for layer in range(config.num_layers + config.mtp_layers):
        _add_attention(total, config)
        _add_feed_forward(total, config, layer)
        # Before each of the two parts.
        total.vector(2 * width)
    for _ in range(config.mtp_layers):
        total.matrix(2 * width, width)
        total.vector(3 * width)
    total.vector(width)
    embedding = vocab_size * width
    # The output projection is used once more for each depth of multi-token prediction.
    total.matmul += (1 + config.mtp_layers) * embedding
    stored = embedding if config.tied_embeddings else 2 * embedding
    query_key, value = _head_widths(config)
    kv_heads = config.num_heads if config.attention == "latent" else config.num_kv_heads
    return ModelCosts(
        parameters=total.all + stored,
        active_parameters=total.active + stored,
        embedding_parameters=0 if config.tied_embeddings else embedding,
        matmul_parameters=total.matmul,
        key_value_features=(config.num_layers + config.mtp_layers) * kv_heads * (query_key + value),
        attention_features=(config.num_layers + config.mtp_layers) * config.num_heads * (query_key + value) / 2,
    )


def _head_widths(config: DecoderConfig) -> tuple[int, int]:
    """Of queries and keys, of values."""
    if config.attention == "latent":
        return config.head_features + config.latent.rotary_features, config.latent.value_features
    return config.head_features, config.head_features


def _add_attention(total: _Sum, config: DecoderConfig) -> None:
    width, heads = config.model_features, config.num_heads
    if config.attention == "latent":
        latent, (query_key, value) = config.latent, _head_widths(config)
        if latent.query_features is not None:
            total.matrix(width, latent.query_features)
            total.vector(latent.query_features)
        total.matrix(latent.query_features or width, heads * query_key)
        total.matrix(width, latent.kv_features + latent.rotary_features)
        total.vector(latent.kv_features)
        total.matrix(latent.kv_features, heads * (config.head_features + value))
        total.matrix(heads * value, width)
        return
    query, key_value = heads * config.head_features, config.num_kv_heads * config.head_features
    for features in (query, query, key_value, key_value):
        total.matrix(width, features)
    if config.qkv_bias:
        total.vector(query + 2 * key_value)
    total.vector({"none": 0, "head": 2 * config.head_features, "all": query + key_value}[config.qk_norm])


def _add_feed_forward(total: _Sum, config: DecoderConfig, layer: int) -> None:
    width = config.model_features
    if config.is_dense(layer):
        total.matrix(3, width, config.dense_features or 0)
        return
    total.matrix(width, config.num_experts)
    experts_width = width
    if config.moe_latent_features is not None:
        experts_width = config.moe_latent_features
        total.matrix(2, width, experts_width)
    total.matrix(3, experts_width, config.expert_features, copies=config.num_experts, used=config.router.top_k)
    if config.shared_features is not None:
        total.matrix(3, width, config.shared_features)
    if config.shared_gate:
        total.matrix(width)
