"""A compact GPT: pre-normalised blocks, learned positions, causal attention, GELU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a four times wider MLP, each added to the residual stream. (samples, length, width) in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        # Without bias: a key's has no gradient but rounding noise, which Adam would blow up to steps of full size.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.attention_out(self._attend(self.qkv(self.attention_norm(x)))))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attend(self, qkv: Tensor) -> Tensor:
        samples, length, _ = qkv.shape
        query, key, value = qkv.view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(samples, length, -1)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Token ids (samples, length) -> logits (samples, length, vocabulary), for length up to ``sequence_length``.

    Args:
        vocabulary: number of distinct tokens.
        sequence_length: most tokens of a sample.
        width: of the residual stream; a multiple of ``heads``.
        depth: blocks.
        heads: attention heads per block.
        dropout: of attention weights and of each residual branch.
        tied: whether the output layer is the embedding's transpose.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        sequence_length: int = 64,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width={width} is no multiple of model.heads={heads}")
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Parameter(torch.empty(sequence_length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight
        self._initialise(width, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > len(self.position_embedding):
            raise ValueError(f"sequences of {length} tokens are longer than the model's {len(self.position_embedding)}")
        x = self.token_embedding(tokens) + self.position_embedding[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _initialise(self, width: int, depth: int) -> None:
        """Unit-variance layers, each of the 2 x depth residual branches scaled so that their sum stays of order one."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            for branch in (block.attention_out, block.mlp_out):
                nn.init.normal_(branch.weight, std=(2 * depth * branch.in_features) ** -0.5)
        # Logits of order 0.1 to 0.5: the first loss is that of a uniform guess, with a tied or an untied head.
        nn.init.normal_(self.head.weight, std=0.25 * width**-0.5)
        nn.init.normal_(self.token_embedding.weight, std=0.25 * width**-0.5)
        nn.init.normal_(self.position_embedding, std=0.25 * width**-0.5)


# Parameters in the blocks: 0.10, 0.40 and 4.74 million; with embeddings and a head over bytes 0.14, 0.47 and 4.89.
SIZES = {
    "0.1M": {"width": 64, "depth": 2, "heads": 2},
    "0.5M": {"width": 128, "depth": 2, "heads": 4},
    "5M": {"width": 256, "depth": 6, "heads": 8},
}


def build(size: str = "0.5M", **changes: int | float | bool) -> GPT:
    """A model of a named size; ``changes`` are further arguments of ``GPT`` and override the size's own."""
    if size not in SIZES:
        raise ValueError(f"model.size must be one of {', '.join(SIZES)}, got {size!r}")
    return GPT(**{**SIZES[size], **changes})


def loss(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The mean cross entropy over predicted tokens, in nats, and the weight of that mean.

    Args:
        model: the GPT, wrapped or not.
        batch: tokens (samples, length + 1), or a mapping with such ``tokens`` and a ``mask`` (samples, length) that is
            True where the target counts.

    Returns:
        The mean, and its weight: the number of targets that count, or None without a mask, where each sample has
        equally many. A batch in which no target counts has loss 0 and weight 0.
    """
    tokens = batch if isinstance(batch, Tensor) else batch["tokens"]
    mask = None if isinstance(batch, Tensor) else batch.get("mask")
    logits = at_least_single(model(tokens[:, :-1])).flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    if mask is None:
        return F.cross_entropy(logits, targets), None
    total = F.cross_entropy(logits, targets.masked_fill(~mask.flatten(), -100), reduction="sum")
    weight = mask.sum()
    return total / weight.clamp(min=1), weight


def metrics(model: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor, float]]:
    """Summed cross entropy over the predicted tokens of (samples, length + 1) ids, in nats, and their number."""
    logits = at_least_single(model(batch[:, :-1])).flatten(0, 1)
    total = F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum")
    return {"loss": (total, batch[:, 1:].numel())}


def at_least_single(logits: Tensor) -> Tensor:
    """Logits in single precision when autocast made them in half."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
