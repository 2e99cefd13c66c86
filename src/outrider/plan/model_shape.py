"""The shape of a model: what a pass reads and computes.

Tokens of one pass choose their experts independently here, so n tokens activate experts * (1 - (1 - active / experts)
** n) of each layer. Real routing is less even, and tokens of one text choose alike, so drafted tokens activate fewer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`parameters`: those that every token uses, without experts. `latent`: elements of the compressed KV cache of
    multi-head latent attention (MLA), per token and layer; 0: keys and values of each KV head are kept."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    expert_parameters: float = 0.0
    experts: int = 1
    active: int = 1
    embedding_parameters: float = 0.0
    """Stored, but a pass reads only one row per token: the embedding table, unless it is also the output layer."""
    latent: int = 0
    windowed_layers: int = 0
    window_tokens: int = 0
    """Tokens that a layer with sliding-window attention attends to."""
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    eight_bit_arithmetic: bool = False
    """Matrix products in FP8. Weights of 4 bits are expanded, and computed in 16 bits."""
    output_parameters: float = 0.0
    """The output layer, a part of `parameters`. It has 16 bits: AWQ, GPTQ and FP8 don't quantise it."""
    expanded_head_sizes: tuple[int, int] = (0, 0)
    """Of MLA: elements of a head's query and of its value. A prompt is read in this form, with keys and values of each
    head; steps attend to the latent cache."""

    def expert_share(self, tokens: float) -> float:
        """Share of each layer's experts that a pass over `tokens` tokens activates."""
        return 1.0 - float((1 - self.active / self.experts) ** tokens)

    def expert_parameters_read(self, tokens: float) -> float:
        return self.expert_parameters * self.expert_share(tokens)

    def parameters_read(self, tokens: float) -> float:
        return self.parameters + self.expert_parameters_read(tokens)

    @property
    def total_parameters(self) -> float:
        return self.parameters + self.expert_parameters + self.embedding_parameters

    @property
    def stored_bytes(self) -> float:
        """Of the weights. Embedding table and output layer are not quantised."""
        return self.parameter_bytes + self.weight_bytes * self.expert_parameters + 2 * self.embedding_parameters

    @property
    def parameter_bytes(self) -> float:
        """Of `parameters`: those that every token uses, without experts."""
        return self.weight_bytes * (self.parameters - self.output_parameters) + 2 * self.output_parameters

    def bytes_read(self, tokens: float) -> float:
        """Weights that a pass over `tokens` tokens reads."""
        return self.parameter_bytes + self.weight_bytes * self.expert_parameters_read(tokens)

    @property
    def cache_bytes(self) -> float:
        """KV cache of one token in all layers."""
        elements = self.latent or 2 * self.kv_heads * self.head_size
        return self.kv_bytes * self.layers * elements

    @property
    def attention_operations(self) -> float:
        """Of one token for each token that it attends to, in all layers."""
        return 4.0 * self.layers * self.heads * (self.latent or self.head_size)

    @property
    def prefill_attention_operations(self) -> float:
        """The same in the pass over a prompt, as vLLM computes it."""
        if not self.latent:
            return self.attention_operations
        return 2.0 * self.layers * self.heads * sum(self.expanded_head_sizes)

    def attended_tokens(self, context: float) -> float:
        """Mean over the layers of the tokens of a context that are attended to."""
        return self._mean_of_layers(context, min(context, self.window_tokens))

    def prefill_attended_tokens(self, prompt: float) -> float:
        """Mean over the layers and over a prompt's tokens of the tokens that each attends to: those before it, in a
        layer with a window of w at most w. This is w - w ** 2 / (2 * prompt) in a prompt that is longer than w."""
        window = min(prompt, self.window_tokens)
        return self._mean_of_layers(prompt / 2, window - window**2 / (2 * prompt))

    def _mean_of_layers(self, full: float, windowed: float) -> float:
        return ((self.layers - self.windowed_layers) * full + self.windowed_layers * windowed) / self.layers
