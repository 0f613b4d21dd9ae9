"""Parameters and FLOPs of a model, counted from its configuration. Imports nothing heavy."""

from dataclasses import dataclass

from moe_train.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Counts that follow from the shapes.

    Attributes:
        parameters: all parameters.
        active_parameters: parameters that one token meets: all but the experts it did not choose.
        embedding_parameters: of the input embedding, which is looked up and not multiplied; 0 where it is tied.
        matmul_parameters: parameters that multiply one token in a matrix product.
        attention_features: layers * heads * head_features, the width of attention over all layers.
    """

    parameters: int
    active_parameters: int
    embedding_parameters: int
    matmul_parameters: int
    attention_features: int

    def flops_published(self, context_tokens: int) -> int:
        """Training FLOPs per token as published: 6 (active - input embedding) + 12 layers heads head_features context.

        No causal discount.
        """
        return 6 * (self.active_parameters - self.embedding_parameters) + 12 * self.attention_features * context_tokens

    def flops_matmul(self, context_tokens: int) -> int:
        """Training FLOPs per token of the matrix products alone, attention over the whole context included.

        6 matmul_parameters + 12 layers heads head_features context, what torch's FLOP counter counts under the math
        attention backend.
        """
        return 6 * self.matmul_parameters + 12 * self.attention_features * context_tokens


def decoder_costs(config: DecoderConfig, vocab_size: int) -> ModelCosts:
    """Counts of the decoder family."""
    width, layers = config.model_features, config.num_layers
    query, key_value = config.num_heads * config.head_features, config.num_kv_heads * config.head_features
    attention = 2 * width * query + 2 * width * key_value
    router = width * config.num_experts
    expert = 3 * width * config.expert_features
    norms = 2 * width + (2 * config.head_features if config.qk_norm else 0)
    embedding = vocab_size * width
    head = 0 if config.tied_embeddings else embedding

    def total(experts: int) -> int:
        return layers * (attention + router + experts * expert + norms) + width + embedding + head

    return ModelCosts(
        parameters=total(config.num_experts),
        active_parameters=total(config.router.top_k),
        embedding_parameters=0 if config.tied_embeddings else embedding,
        matmul_parameters=layers * (attention + router + config.router.top_k * expert) + embedding,
        attention_features=layers * query,
    )
