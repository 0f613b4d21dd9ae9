"""`LocalAttention`: attention where every rank holds whole sequences.

Shape legend: B sequences (rows) here, S token slots per row, H query heads, G key/value heads, D features per head of
queries and keys, V features per head of values.
"""

from torch import Tensor

from moe_parallel.attention.core import check_attention
from moe_parallel.attention.whole_rows import attend_to_rows
from moe_parallel.errors import MoeParallelError
from moe_parallel.sequence import SequenceInfo


class LocalAttention:
    """Attention over whole sequences; no communication. An `AttentionCore`.

    Rows of one document are causal by `torch.nn.functional.scaled_dot_product_attention`. Where several documents share
    a row (`info.document_BS`), and in windows, little more is computed than what is seen, and no mask spans a row. The
    first of the layers that are given the same `info` decides on the host which rectangles these are, for all of them.
    If q is on another device the host waits for it there, once per microbatch and window.

    Padding needs no mask: padding slots sit at the end of a row, where causality hides them from every real token. As
    every slot they see themselves, so no row of the softmax is empty.
    """

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BSGD: Tensor,
        v_BSGV: Tensor,
        info: SequenceInfo,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """out_BSHV, as `AttentionCore`.

        Raises:
            MoeParallelError: the sequences are split over ranks (`info.context`), H is not a multiple of G, a window in
                which a token does not see itself, or the slots of a document are not consecutive.
        """
        if info.context is not None:
            raise MoeParallelError(
                f"local attention needs whole sequences, but they are split over {info.context.group.size()} ranks; "
                "choose an attention core that communicates, or parallel.cp = 1"
            )
        check_attention(q_BSHD, k_BSGD, window)
        scale = q_BSHD.shape[3] ** -0.5 if scale is None else scale
        return attend_to_rows(q_BSHD, k_BSGD, v_BSGV, info, info.document_BS, scale, window)
