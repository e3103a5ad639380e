"""The catalogue of findings: stable codes, like a linter's, and what each of them means. `explain` prints it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODES", "SLUGS", "Code"]


@dataclass(frozen=True, slots=True)
class Code:
    """A kind of finding. The texts are plain ASCII with code between backticks, and hold for every run."""

    code: str
    slug: str
    means: str
    """What is the case; its first sentence stands alone."""
    established: str
    """By which evidence it is proved."""
    fix: str
    """What to change. For parameters that never get a gradient it is never DDP's flag, which would only hide them."""
    harmless: str
    """When it may be ignored."""


_CATALOGUE = (
    # 100s: why a parameter was missed
    Code(
        "DDC100",
        "missed",
        means="No gradient arrived, and why is not established.",
        established="The parameter's own hooks prove that it was missed. Either no step with this pattern was diagnosed, or"
        " the trace of its forward, the graph walk and the gradients that arrived at its outputs fit no cause of this list.",
        fix='Record again with `ddpcov.track(model, diagnose="always")`, which diagnoses every step. Then use the parameter in'
        " the loss, delete it, or call `p.requires_grad_(False)` before the model is wrapped.",
        harmless="Where another phase of training is meant to use it, and no wrapper waits for it now.",
    ),
    Code(
        "DDC101",
        "never-called",
        means="The module that owns the parameter never ran in the forward.",
        established="In the diagnosed step (the first, or the first of a new pattern) no hook on the owning module fired,"
        " under any of its aliases, and the trace of torch functions shows no read of the parameter from elsewhere.",
        fix="Call the module in the forward: `x = self.head(x)`. If it is not needed, do not build it (`backbone.fc ="
        " nn.Identity()`), or freeze it before wrapping: `self.head.requires_grad_(False)`.",
        harmless="Where this branch runs in other steps on purpose (see DDC201), and no wrapper waits for it in this one.",
    ),
    Code(
        "DDC102",
        "never-read",
        means="The owning module ran, but this parameter was not read.",
        established="The hooks on the module saw it run with grad mode on, and in the trace of that forward no torch function"
        " took the parameter as an argument.",
        fix="Read it in the forward (`x = x + self.mask_token`), or do not create it (`nn.Linear(8, 8, bias=False)`,"
        ' `self.register_parameter("mask_token", None)`), or freeze it before wrapping:'
        " `self.mask_token.requires_grad_(False)`.",
        harmless="Where it serves an option that is off in this run, such as masking, and no wrapper waits for it.",
    ),
    Code(
        "DDC103",
        "no-grad-region",
        means="The parameter was used only while grad mode was off, so autograd recorded nothing of it.",
        established="Every run of the owning module and every traced read of the parameter happened with grad mode off, as"
        " under `torch.no_grad()` or `torch.inference_mode()`.",
        fix="If it is to learn, move the call out of the `with torch.no_grad():` block. If it is not, say so before wrapping:"
        " `model.vision.requires_grad_(False)`.",
        harmless="Without DDP, where the module is meant as a fixed feature extractor.",
    ),
    Code(
        "DDC104",
        "graph-cut",
        means="The parameter's value reaches an output of the forward, or leaves torch as a number, but the autograd graph is"
        " cut on the way. No gradient can come back past the cut.",
        established="The trace of torch functions carries its value into an output, or out of torch through `item()`,"
        " `numpy()` or `.data`, and the graph walk from the outputs does not arrive at it. The finding names the cutting call"
        " and its line.",
        fix="Remove the cut: `x @ self.w` for `x @ self.w.data`, `y` for `y.detach()`, a loss made of tensors for one made of"
        " `.item()`. Past rounding or argmax hand the gradient straight through: `x + (q - x).detach()`.",
        harmless="Where the stop is meant: a target network, the other player's turn in a GAN, a codebook that follows moving"
        " averages. Freeze what never learns by gradient.",
    ),
    Code(
        "DDC105",
        "output-not-in-loss",
        means="The parameter feeds an output of the forward that the loss did not use. The finding names the output: `[1]`,"
        ' `.aux`, `["mask"]`.',
        established="The graph walk leads from that output to the parameter, and in the backward pass no defined gradient"
        " arrived at any output that leads to it.",
        fix='Use the output: `loss = loss + criterion(out["aux"], target)`. In batches that have no target for it, keep it in'
        ' the loss with weight zero: `loss = loss + 0.0 * out["aux"].sum()`. If nothing ever uses it, stop computing it, and'
        " delete or freeze its layers before wrapping.",
        harmless="Without DDP, where only some batches have a target for that output.",
    ),
    Code(
        "DDC106",
        "result-discarded",
        means="The parameter took part in a computation with gradient whose result reaches no output of the forward.",
        established="The trace shows it read with grad mode on, and neither the graph walk nor the flow of values from it"
        " arrives at any output.",
        fix="Return what was computed (`return logits, aux_loss`) and use it in the loss. If it is not needed, remove the"
        " call, and delete or freeze the module before wrapping: `self.pooler.requires_grad_(False)`.",
        harmless="Without DDP, where the result is only logged. Computing it under `torch.no_grad()` is cheaper.",
    ),
    Code(
        "DDC107",
        "loss-detached",
        means="A backward pass, or a step, reached no parameter at all: its loss does not depend on the model.",
        established="No gradient accumulator of any tracked parameter ran in that pass, or the optimizer stepped after passes"
        " that reached none. The finding lists every trainable parameter of the rank.",
        fix="Keep the loss attached on every rank: where there is no target, `loss = logits.sum() * 0.0`, not `torch.zeros((),"
        " requires_grad=True)`. Call `backward()` on the loss itself, not on `torch.tensor(loss.item())` or `loss.detach()`.",
        harmless="Where the pass trains another model that is not tracked, and no other rank waits for this one.",
    ),
    Code(
        "DDC108",
        "undefined-gradient",
        means="An output that the parameter feeds got a gradient, but a node on the way handed on none. Such a node is mostly"
        " a custom Function that returned None.",
        established="The graph walk leads from the output to the parameter, a defined gradient arrived at the output, and"
        " between the two a node, named in the finding, handed on an undefined one.",
        fix="In the backward of that `torch.autograd.Function` return a gradient for each input, in the order of the forward's"
        " arguments: `return grad * w, grad * x`. None is right only where `ctx.needs_input_grad[i]` is False.",
        harmless="Where the Function is meant to stop the gradient for this input. Freeze what nothing else trains.",
    ),
    Code(
        "DDC109",
        "zero-gradient",
        means="The gradient is exactly zero in every sampled step. The parameter does not learn from it.",
        established="With `ddpcov.track(model, values=N)` gradients are classified on the device every N steps. Every sample"
        " of this parameter held zeros alone.",
        fix="Look for a factor of zero: a mask that hides everything, a ReLU whose inputs are all negative, a weight of 0 in"
        " `loss = loss + weight * aux`. Under torch.compile an output left out of the loss gives zeros too: use it, or stop"
        " returning it.",
        harmless="Where the zero is meant, as in `loss + 0.0 * out.sum()`, and early in training where the factor beside it"
        " starts at zero, as the A matrix of LoRA does.",
    ),
    Code(
        "DDC110",
        "checkpoint-cut",
        means="The parameter was read inside a reentrant checkpoint none of whose inputs needed a gradient, so nothing inside"
        " it gets one.",
        established="The trace shows the read inside `checkpoint(..., use_reentrant=True)`, and no tensor given to that call"
        " required grad.",
        fix="Checkpoint the other way: `checkpoint(block, x, use_reentrant=False)`. Or let the input need a gradient:"
        " `x.requires_grad_()`, in transformers `model.enable_input_require_grads()`.",
        harmless="Only where the block is not meant to learn. Freeze it then, before wrapping.",
    ),
    Code(
        "DDC111",
        "independent",
        means="The parameter took part in what was differentiated, but the loss does not depend on it, as with the last bias"
        " under a gradient penalty.",
        established="It is in the graph of an `autograd.grad(..., create_graph=True)` run, and not in the graph of the loss"
        " that used the result.",
        fix="Put the term that depends on it into the same pass: `(critic_loss + 10.0 * penalty).backward()`. If nothing else"
        " trains it, build the layer without it: `nn.Linear(8, 1, bias=False)`.",
        harmless="Without DDP, where another pass trains it: the gradient of this loss is zero there.",
    ),
    # 200s: when and where
    Code(
        "DDC201",
        "some-steps",
        means="The parameter was missed in some steps and covered in others, in the same steps on all ranks. A finding of the"
        " 100s beside it says why.",
        established="The parameter's hooks record every backward pass, and the steps in which it was missed are the same in"
        " the records of all ranks.",
        fix="Mend the cause if it is an accident. Where a branch is meant to come and go, wrap with"
        " `DistributedDataParallel(model, find_unused_parameters=True)`, without static_graph; or run the branch every time,"
        " with weight zero: `loss = loss + 0.0 * aux.sum()`.",
        harmless="Where the branch comes and goes on purpose, and find_unused_parameters=True is set or no wrapper waits for"
        " it.",
    ),
    Code(
        "DDC202",
        "some-ranks",
        means="The parameter was covered on some ranks and missed on others in the same step. With find_unused_parameters off,"
        " the ranks that have the gradient wait for those that do not, which ends in a hang or an error.",
        established="The hooks of each rank record each step, and the records of the ranks differ in this one.",
        fix="Let all ranks take the same branch: `dist.broadcast(choice, src=0)`. Or run it on every rank, with weight zero"
        ' where it is not wanted: `loss = loss + 0.0 * out["aux"].sum()`. Where ranks must differ:'
        " `DistributedDataParallel(model, find_unused_parameters=True)`.",
        harmless="With find_unused_parameters=True, where ranks differ on purpose. The average still counts the ranks that"
        " missed it, with zero.",
    ),
    Code(
        "DDC203",
        "some-passes",
        means="The parameter was missed in one backward pass of a step and covered in another of the same step, as with"
        " gradient accumulation or alternating losses.",
        established="The parameter's hooks record every pass, and the passes between two optimizer steps make one step.",
        fix="Add the losses and go back once: `(loss_a + loss_b).backward()`. Where the passes must stay apart under DDP, run"
        " all but the last under `with model.no_sync():` and let the last reach everything, or wrap with"
        " find_unused_parameters=True.",
        harmless="Without DDP: the step has its gradient. With DDP, where every pass outside `no_sync()` covers it.",
    ),
    # 300s: the wrapper
    Code(
        "DDC301",
        "frozen-after-wrap",
        means="DDP waits for the parameter, but `requires_grad` was turned off after the model was wrapped.",
        established="The wrapper's state: what DDP registered when it was built, against what requires grad before each pass.",
        fix="Freeze first, wrap then: `model.trunk.requires_grad_(False)`, `DistributedDataParallel(model)`. To freeze during"
        " training, wrap again on every rank: `model = DistributedDataParallel(model.module)`.",
        harmless="With find_unused_parameters=True: DDP then goes on, but reduces zeros for it in every step.",
    ),
    Code(
        "DDC302",
        "thawed-after-wrap",
        means="The parameter was frozen when the model was wrapped and is trainable now. DDP does not know it, so its gradient"
        " is not averaged, and the ranks drift apart without an error.",
        established="The wrapper's state: what DDP registered when it was built, against what requires grad before each pass.",
        fix="Wrap again on every rank after thawing: `model.module.backbone.requires_grad_(True)`, `model ="
        " DistributedDataParallel(model.module)`. Give it to the optimizer, too, unless it is there.",
        harmless="Only where each rank is meant to train a copy of its own.",
    ),
    Code(
        "DDC303",
        "replaced-after-wrap",
        means="The parameter was added or replaced after the model was wrapped. DDP holds the old tensor, if any, so the"
        " gradient of the new one is not averaged.",
        established="The wrapper's state: the tensors that DDP registered when it was built, against those that are the"
        " model's parameters before each pass.",
        fix="Change the model first (`model.head = nn.Linear(64, 10)`), wrap it then, and build the optimizer last. During"
        " training, wrap again on every rank, `model = DistributedDataParallel(model.module)`, and build a new optimizer.",
        harmless="Only where each rank is meant to train a copy of its own.",
    ),
    Code(
        "DDC304",
        "wrapper-bypassed",
        means="A gradient arrived in a pass that the wrapper's forward had not prepared, so DDP did not average it. Every rank"
        " trains a copy of its own, without an error.",
        established="The wrapper's state: its forward did not run before the pass (the model was called through `.module`), or"
        " an earlier backward had used it up (a second one on the same forward).",
        fix='Call the wrapper, and let the forward choose: `model(tokens, mode="score")`, not `model.module.score(tokens)`. Go'
        " back once for each forward: `(loss_a + loss_b).backward()`.",
        harmless="Where your own code averages these gradients (`dist.all_reduce(p.grad)`), or each rank is meant to train a"
        " copy of its own.",
    ),
    Code(
        "DDC305",
        "opaque-output",
        means="The forward returns tensors inside an object that DDP does not search. With find_unused_parameters=True DDP"
        " takes what is behind them for unused.",
        established="The returned value is walked as DDP's search does it (tensors, lists, tuples, dicts, dataclasses) and"
        " into plain objects as well. The named tensor is found in the second way alone.",
        fix='Return what DDP searches: `return {"logits": logits, "aux": aux}`, a tuple, or the same class with `@dataclass`'
        " above it.",
        harmless="With find_unused_parameters and static_graph both off: DDP then searches nothing.",
    ),
    Code(
        "DDC306",
        "reached-twice",
        means="DDP counts the parameter ready twice in one backward pass. It was accumulated more than once, or DDP's search"
        " had marked it unused and it was reached all the same.",
        established="Its gradient accumulator ran more than once in an averaged pass, or DDP's own error gives its index,"
        " which is turned into the name.",
        fix="Checkpoint with `checkpoint(block, x, use_reentrant=False)`. With find_unused_parameters=True, make one forward"
        " of two (`model(torch.cat([a, b]))`) and read parameters inside the forward only; where every pass reaches every"
        " parameter, `DistributedDataParallel(model)` without the flag is the cure.",
        harmless="Without DDP, and with static_graph=True as long as every step repeats it alike.",
    ),
    Code(
        "DDC307",
        "needless-flag",
        means="find_unused_parameters=True was never needed, and every pass paid for a search of the graph.",
        established="In at least two finished steps, on every rank, each pass gave a gradient to every parameter that DDP"
        " waits for. No rank's record is missing or breaks off.",
        fix="Wrap without it: `DistributedDataParallel(model)`.",
        harmless="It costs time alone. Keep it if a phase that was not recorded skips a branch.",
    ),
    Code(
        "DDC308",
        "graph-changed",
        means="static_graph=True promises that every step uses the same parameters and all outputs, and this run broke the"
        " promise.",
        established="The set of parameters that was reached differs from an earlier one on the same rank, or no gradient"
        " arrived at an output of the forward, which the finding names.",
        fix="Wrap without it: `DistributedDataParallel(model)`. If the set varies by design: `DistributedDataParallel(model,"
        " find_unused_parameters=True)`. If only an output is unused, stop returning it, or use it in the loss.",
        harmless="Never: DDP relies on the promise, and breaking it ends in an error, a hang or gradients that are not"
        " averaged.",
    ),
    Code(
        "DDC309",
        "gradients-differ",
        means="Every rank has a gradient for the parameter, but after the backward pass they are not equal.",
        established="With `ddpcov.track(model, sync_check=N)`, every N steps, fingerprints of the gradients are compared"
        " across ranks after the backward pass.",
        fix="Mend DDC302, DDC303, DDC304 or DDC310 first if they name it, too. Otherwise remove the code that changes `.grad`"
        " on single ranks after the backward pass, or average by hand: `dist.all_reduce(p.grad); p.grad /="
        " dist.get_world_size()`.",
        harmless="Inside `no_sync()`, and where ranks are meant to differ: experts of their own, local SGD.",
    ),
    Code(
        "DDC310",
        "unsynchronised-pass",
        means="A pass under DDP ended with the reduction unfinished, because a parameter that DDP waits for never came. The"
        " gradients of that step are local, also where no error follows, as after the last step.",
        established="The wrapper's state and the parameter's hooks: the step ended, both flags off, and a parameter that DDP"
        " waits for was reached in none of the passes since the wrapper's forward.",
        fix="Mend what the 100s say of that parameter: use it in the loss, or freeze it before wrapping"
        " (`model.aux.requires_grad_(False)`).",
        harmless="Only where no optimizer step follows that pass.",
    ),
    # 400s: the optimizer
    Code(
        "DDC401",
        "not-in-optimizer",
        means="The parameter gets gradients, but no optimizer given to `track` holds it, so it is never updated.",
        established="The tensors in the optimizers' parameter groups are compared with the model's parameters, and the hooks"
        " saw a gradient arrive.",
        fix='Add it: `optimizer.add_param_group({"params": model.head.parameters()})`. Or, if it is not to learn, freeze it'
        " before wrapping: `model.head.requires_grad_(False)`.",
        harmless="Where its optimizer was not given to `track` (give all: `optimizer=[opt_g, opt_d]`), or only the gradient"
        " itself is wanted.",
    ),
    Code(
        "DDC402",
        "unregistered",
        means="The graph ends in a trainable tensor that no module registers. DDP, the state dict and `model.parameters()` do"
        " not know it.",
        established="The graph walk from the forward's outputs ends in a leaf that requires grad and is no registered"
        " parameter.",
        fix="Register it before wrapping: `self.cells = nn.ModuleList(cells)` for a plain list, `self.scale ="
        " nn.Parameter(torch.ones(8))` for a plain tensor.",
        harmless="Where an input requires grad on purpose, as for a gradient penalty or an adversarial example, or a tensor"
        " has an optimizer and an average of its own.",
    ),
    Code(
        "DDC403",
        "optimizer-stale",
        means="The optimizer holds a trainable tensor that is no parameter of the model, and that never got a gradient.",
        established="The tensors in the optimizer's parameter groups are compared with the model's parameters, and no gradient"
        " arrived at this one.",
        fix="Build the optimizer after the last change of the model: `model.head = nn.Linear(64, 10)`, then"
        " `torch.optim.SGD(model.parameters(), lr=0.1)`.",
        harmless="Where the optimizer also serves another model, which is not tracked and does not train in these steps.",
    ),
    # 500s: the capture
    Code(
        "DDC501",
        "shard-incomplete",
        means="A rank ended inside a backward pass: killed, crashed or hung. The finding says what had been covered by then.",
        established="The rank's shard holds a pass that was begun and not ended, or an exception that was raised inside one. A"
        " killed process leaves it readable.",
        fix="Read that rank's log, and `dmesg` for the out-of-memory killer. After a hang, mend DDC202 and DDC107 first;"
        ' `dist.init_process_group("nccl", timeout=timedelta(minutes=5))` makes an error of it.',
        harmless="Where you stopped the job yourself. All steps before the open one are complete.",
    ),
    Code(
        "DDC502",
        "rank-missing",
        means="There is no data of a rank: its shard is missing or could not be read.",
        established="The ranks that took part are noted in what the others recorded, and compared with those whose data is"
        " here.",
        fix='Enter `ddpcov.track(model, out="run.bin")` on every rank, in a folder that all of them share; or copy the lacking'
        " shard, such as `run.bin.rank3`, beside the others and read again.",
        harmless="For a look at the other ranks. Advice on DDP's flags needs them all.",
    ),
    Code(
        "DDC503",
        "parameters-differ",
        means="The ranks do not track the same parameters: names, shapes or types differ.",
        established="Names, shapes and types that each rank recorded are compared when the ranks are merged, by fingerprint"
        " first.",
        fix="Build the model from the same configuration on every rank. Where ranks hold different parts on purpose:"
        " `ddpcov.track(model, same_parameters=False)`.",
        harmless="With pipeline stages or experts of their own on each rank.",
    ),
    Code(
        "DDC504",
        "nothing-recorded",
        means="No backward pass and no optimizer step was seen, so nothing can be said about any parameter.",
        established="The records of all ranks hold neither a pass nor a step.",
        fix="Put the training steps inside the block, `with ddpcov.track(model):`, and give it the model that is trained, not"
        " a copy.",
        harmless="Where only evaluation was recorded.",
    ),
)

CODES = {code.code: code for code in _CATALOGUE}
"""Code → what it means; in the order of the codes."""

SLUGS = {code.code: code.slug for code in _CATALOGUE}
"""Code → slug of every finding."""
