"""The table of metrics: what every number means. `moe-train explain`, the report and the documentation read it.

Symbols: n_e choices of expert e, E experts of a layer, K choices per token, T tokens, N targets of the global batch.
"""

import difflib
from dataclasses import dataclass

from moe_train.errors import MoeTrainError


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: in records and files.
        label: on the console; empty where it is not shown there.
        unit: of the value in records.
        definition: one sentence.
        formula: how it is computed.
        good: what a healthy run shows.
    """

    name: str
    label: str
    unit: str
    definition: str
    formula: str
    good: str


METRICS = (
    Metric(
        "step",
        "step",
        "steps",
        "Finished optimizer steps, skipped ones included.",
        "counts from 1",
        "train.steps at the end",
    ),
    Metric(
        "loss",
        "loss",
        "nats per token",
        "Cross-entropy of the next token over the global batch, before the update; balance losses are not in it.",
        "sum over targets of -ln p(target) / N; train.loss_norm = microbatch: mean over balance microbatches of means",
        "starts near ln(vocabulary size), falls below the unigram and then the bigram entropy of the text",
    ),
    Metric(
        "lr",
        "lr",
        "",
        "Learning rate of this step.",
        "schedule of section optim, driven by the updates so far; a skipped step does not advance it",
        "warms up, then decays; too large shows as a loss that jumps or a gnorm that grows",
    ),
    Metric(
        "gnorm",
        "gnorm",
        "",
        "Global L2 norm of the gradient before clipping; each element of the model counts once.",
        "sqrt(sum over all parameters of g^2)",
        "settles after warm-up; clipping acts while it is above optim.max_grad_norm",
    ),
    Metric(
        "skipped",
        "skipped",
        "",
        "The loss or the gradient norm was not finite: weights, moments and schedule are as before the step.",
        "not (isfinite(loss) and isfinite(gnorm))",
        "never; the log names the layers whose router saw it first",
    ),
    Metric(
        "balance",
        "balance",
        "",
        "Largest over mean expert load of a layer in this step, averaged over layers.",
        "mean over layers of max_e(n_e) / mean_e(n_e)",
        "1.00 is perfect, E / K is collapse; below 1.5 after warm-up",
    ),
    Metric(
        "dead",
        "dead",
        "experts",
        "Experts that received no token in this step, over all layers.",
        "number of (layer, expert) with n_e = 0, of layers * E",
        "0; an expert that stays dead is memory without use: raise model.balance.aux",
    ),
    Metric(
        "num_experts",
        "",
        "experts",
        "Experts over all layers, what `dead` is out of.",
        "layers * E",
        "constant",
    ),
    Metric(
        "drop",
        "drop",
        "choices",
        "Choices of valid tokens that reached no expert in this step, because its capacity was used up.",
        "sum over layers of choices without a row",
        "0 where nothing limits capacity",
    ),
    Metric(
        "aux_loss",
        "",
        "",
        "Balance loss per balance microbatch without its coefficient, averaged over layers; 0 where it is not used.",
        "E / (K T^2) * sum_e n_e * sum_t A_te, A the normalised scores; mean over the balance microbatches of the step",
        "1.0 is balanced, E / K is collapse",
    ),
    Metric(
        "seq_loss",
        "",
        "",
        "The same as aux_loss over single sequences; 0 where it is not used.",
        "mean over segments of E / (K T^2) * sum_e n_e * sum_t A_te",
        "1.0 is balanced; stays above aux_loss, since one sequence has few topics",
    ),
    Metric(
        "global_loss",
        "",
        "",
        "The same over the global batch, against the expert load of the previous update; 0 where it is not used.",
        "E / (K C N_tok) * sum_e n_e * sum_t A_te, n_e and C counts and tokens of the previous update",
        "1.0 is balanced",
    ),
    Metric(
        "z_loss",
        "",
        "",
        "Mean squared log-partition of the router logits without coefficient, averaged over layers; 0 where not used.",
        "mean over tokens of logsumexp(logits)^2",
        "small and steady; growth means that router logits drift",
    ),
    Metric(
        "mtp_loss",
        "",
        "nats per token",
        "Cross-entropy of the tokens beyond the next one (multi-token prediction); 0 where there is none.",
        "mean over depths d of sum over their targets of -ln p_d(target) / N_d",
        "near the loss, since each depth sees the token before the one it predicts; falls with it",
    ),
    Metric(
        "tokens",
        "",
        "tokens",
        "Valid tokens of all finished steps.",
        "sum over steps of the non-padding tokens of the global batch",
        "steps * global batch * sequence length where nothing is padding",
    ),
    Metric(
        "step_seconds",
        "",
        "s",
        "Wall-clock time of one step: data, forward, backward, update.",
        "end - start of the step; validation, checkpoints and logging are outside",
        "even; outliers are worth a look",
    ),
    Metric(
        "tokens_per_second",
        "tok/s",
        "tokens/s",
        "Training throughput of this step, over all ranks.",
        "valid tokens of the step / step_seconds",
        "even after the first steps",
    ),
    Metric(
        "flops_per_second",
        "FLOP/s",
        "FLOP/s",
        "Arithmetic rate of matrix products and attention, shown in TF/s or GF/s.",
        "sum over sequences of length * flops_matmul(length) / step_seconds; flops_matmul = 6 * matmul parameters of"
        " one token + 12 * layers * heads * head features * context, no causal discount",
        "as near to the peak of the device as shapes allow; small models are far from it",
    ),
    Metric(
        "work_balance",
        "",
        "",
        "Predicted share of the ranks' time that goes into tokens, not into padding or waiting for the slowest rank.",
        "work of all sequences / (ranks * sum over microbatches of the largest work of a rank), cp and dp alone; work ="
        " 6 * matmul parameters * length + 6 * layers * heads * head features * length^2",
        "1 for windows; with sequences of other lengths parallel.dynamic_cp_tokens raises it",
    ),
    Metric(
        "memory_peak_bytes",
        "memory",
        "bytes",
        "Largest memory in use during this step: the device's allocator on a GPU, the process on a CPU.",
        "peak of the step",
        "constant after the first steps; steady growth is a leak",
    ),
    Metric(
        "memory/parameters",
        "",
        "bytes",
        "Weights of the model as a rank computes with them; what fsdp gathers counts while it is there.",
        "storages of parameters and buffers of modules, at the peak of a phase (memory.jsonl)",
        "bytes of a weight * parameters of the rank",
    ),
    Metric(
        "memory/gradients",
        "",
        "bytes",
        "Gradients of parameters, with the buffers in which they are added up and reduced.",
        "storages that the engine makes for gradients, or that are .grad, at the peak of a phase (memory.jsonl)",
        "bytes of optim.gradient_dtype * parameters of the rank; with fsdp a share of it",
    ),
    Metric(
        "memory/optimizer",
        "",
        "bytes",
        "Master weights and moments on the device, where they are other tensors than the weights.",
        "storages that the engine makes when it takes the model over, at the peak of a phase (memory.jsonl)",
        "12 bytes * parameters / replicas that share them, with AdamW in float32; 8 where float32 weights of one rank "
        "are their own masters",
    ),
    Metric(
        "memory/activations",
        "",
        "bytes",
        "What a microbatch keeps for its backward: all that outlives the part of a forward that made it, its tokens and"
        " tables, and what another stage sent; with kernels.graphs also their static buffers.",
        "storages made in a part of the forward that outlive it, at the peak of a phase (memory.jsonl)",
        "memory.recompute and memory.offload lower it, and smaller microbatches",
    ),
    Metric(
        "memory/dispatch",
        "",
        "bytes",
        "What dispatchers make: buffers to send and to receive, and their plans.",
        "storages made between router and experts and behind these, at the peak of a phase (memory.jsonl)",
        "grows with the imbalance of the routing",
    ),
    Metric(
        "memory/offloaded",
        "",
        "bytes",
        "Host memory for what was offloaded, where the host is the device; elsewhere it does not count.",
        "storages in host memory of activations and optimizer state, at the peak of a phase (memory.jsonl)",
        "0 on a GPU",
    ),
    Metric(
        "memory/temporary",
        "",
        "bytes",
        "What nobody keeps: results that are read at once, gradients of activations, parts of the update.",
        "all that is in no other class, at the peak of a phase (memory.jsonl)",
        "about what one layer needs in its backward",
    ),
    Metric(
        "comm/network_bytes",
        "",
        "bytes",
        "Bytes that dispatchers sent to other machines in this step, over all ranks, layers and passes, and of plans.",
        "sum over exchanges and ranks of rows * bytes of a row to ranks of another machine; machines as in"
        " parallel.ranks_per_node",
        "follows the routing: comm.kind = hybrid sends a token once to a machine, alltoall once to each rank there",
    ),
    Metric(
        "comm/node_bytes",
        "",
        "bytes",
        "Bytes that dispatchers sent to other ranks of their machine in this step, over all ranks.",
        "as comm/network_bytes, to ranks of the same machine; NVLink on GPUs",
        "with comm.kind = hybrid more than with alltoall: what crosses the network once is passed on here",
    ),
    Metric(
        "comm/self_bytes",
        "",
        "bytes",
        "Bytes of exchanges that did not leave their rank in this step, over all ranks.",
        "as comm/network_bytes, from a rank to itself",
        "1 / ranks of what is exchanged where routing is balanced",
    ),
    Metric(
        "comm/metadata_bytes",
        "",
        "bytes",
        "Bytes of plans, by which ranks tell each other the sizes of exchanges, over all ranks; part of those above.",
        "sum over plans and ranks of 8 bytes * words * other ranks",
        "a small share of the bytes of rows",
    ),
    Metric(
        "comm/collectives",
        "",
        "collectives",
        "Collectives that the dispatchers of a rank started in this step, of the rank with the most.",
        "sum over layers, microbatches and passes",
        "constant from step to step",
    ),
    Metric(
        "comm/host_syncs",
        "",
        "",
        "How often the dispatchers of a rank made the host wait for numbers of its device, of the rank with the most.",
        "sum over layers and microbatches",
        "1 for each layer and microbatch, 0 with static sizes",
    ),
    Metric(
        "comm/peak_buffer_bytes",
        "",
        "bytes",
        "Most that the dispatchers of a rank held at once to send and to receive, of the rank with the most.",
        "largest sum of the send and receive buffers of exchanges under way",
        "grows with the imbalance of the routing",
    ),
    Metric(
        "eta_seconds",
        "eta",
        "s",
        "Time that the remaining steps will take at the mean pace since the start, validation and saving included.",
        "(train.steps - step) * seconds since the start / steps since the start",
        "falls",
    ),
    Metric(
        "valid_loss",
        "valid",
        "nats per token",
        "Cross-entropy of the next token on held-out text; nothing in training depends on it.",
        "sum over targets of -ln p(target) / targets, over the first train.valid_sequences held-out sequences",
        "falls with the training loss; a gap that opens is overfitting",
    ),
    Metric(
        "valid_bits_per_byte",
        "bits/byte",
        "bits per byte",
        "Validation loss per byte of text in bits, comparable between tokenizers; what a compressor would need.",
        "valid_loss / ln 2 * tokens / bytes of the held-out text",
        "8 is no knowledge; general-purpose compressors need 2 to 3 on English text",
    ),
    Metric(
        "unigram_nats",
        "",
        "nats per token",
        "Entropy of single tokens of the corpus: the loss of a model that knows only how frequent each token is.",
        "-sum_x p(x) ln p(x)",
        "a line that the loss must cross early",
    ),
    Metric(
        "bigram_nats",
        "",
        "nats per token",
        "Entropy of a token given the one before it: the loss of a model that looks one token back.",
        "-sum_xy p(x, y) ln p(y | x)",
        "a line below which a model uses context",
    ),
    Metric(
        "expert_load",
        "",
        "choices",
        "Choices of each expert by valid tokens in one step, per layer; file expert_load.jsonl.",
        "n_e, layers x experts",
        "every expert near K * T / E",
    ),
)

_BY_NAME = {metric.name: metric for metric in METRICS}
_BY_LABEL = {metric.label: metric for metric in METRICS if metric.label}


def metric(name: str) -> Metric:
    """A metric by its name or by its label on the console.

    Raises:
        MoeTrainError: there is none; the message has the names.
    """
    found = _BY_NAME.get(name) or _BY_LABEL.get(name)
    if found is None:
        near = difflib.get_close_matches(name, [*_BY_NAME, *_BY_LABEL], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise MoeTrainError(f"there is no metric {name!r}; {hint}metrics are {', '.join(_BY_NAME)}")
    return found
