"""The faults that ``python -m scripts.mutants`` puts in, each with the tests that should notice it."""

from __future__ import annotations

from scripts.mutants.clipping import CLIPPED
from scripts.mutants.machines import BETWEEN_MACHINES
from scripts.mutants.mutant import mutant
from scripts.mutants.processes import IN_PROCESSES
from scripts.mutants.tables import IN_TWO_PARTS

CHECK, ORDERING = "plan/verify/check.py", "plan/verify/ordering.py"
GROUPS, COPIES, OPS, LINK = (f"plan/assembly/{name}.py" for name in ("groups", "copies", "ops", "link"))
RESIDENCY, LIVE, HOST_TASK, ACTIVATIONS, SNAPSHOTS, STREAMING = (
    f"execute/memory/{name}.py"
    for name in ("residency", "live_group", "host_task", "activations", "snapshots", "streaming")
)
GRADIENTS, SLOTS, OPTIMIZER, MICRO_BATCHES = (
    f"execute/updates/{name}.py" for name in ("gradients", "gradient_slots", "optimizer", "window")
)
BLOCK_RUN, SHARED = "execute/blocks/run.py", "execute/blocks/shared_inputs.py"
GUARD, GRADIENT_VIEW, ITERATION = (
    f"execute/{name}.py" for name in ("user_code/guard", "user_code/gradient_view", "iteration")
)
REPLAN, RESUME, SAMPLE, SUMS, BATCH_SIZE = (
    f"strategy/{name}.py" for name in ("replan", "checkpoint/resume", "first/sample", "checkpoint/sums", "batch_size")
)
HEAD, PARTS, SAVING = "model/head.py", "model/parts.py", "model/saving.py"
COST, STATES = "profiling/block_cost.py", "profiling/optimizer.py"
PACKING, LOSS, ROWS = "finetune/data/sequences.py", "finetune/optimizers.py", "finetune/data/rows.py"
RUN, FIRST_PLAN = "hf/run.py", "strategy/first/planning.py"
HANDOVER = "execute/training/handover.py"

VERIFY, PLANS = "unit/verify", "unit/assembly"
ENGINE, TRAPS = "parity/engine/test_engine.py", "parity/engine/test_traps.py"
WINDOWS, LOOPS, CLIPPED_WINDOWS = (f"parity/windows/test_{name}.py" for name in ("windows", "loops", "clipping"))
PLANNED_WINDOWS = "unit/plan/test_windows.py"

PLANNING = (
    mutant(
        "a plan may need more than its budget",
        CHECK,
        "if memory[worst] > plan.budget_bytes:",
        "if memory[worst] > 2 * plan.budget_bytes:",
        VERIFY,
    ),
    mutant(
        "memory may be given back before it is taken",
        "schema/plan.py",
        "not op.step <= op.release_after < steps:",
        "not 0 <= op.release_after < steps:",
        VERIFY,
    ),
    mutant("a tensor may be updated twice", CHECK, "            if t in seen:\n", "            if False:\n", VERIFY),
    mutant("a block may run again without its input", CHECK, "elif not block.chained:\n", "elif False:\n", VERIFY),
    mutant("an outdated device copy passes", ORDERING, "buffer.outdated = True", "buffer.outdated = False", VERIFY),
    mutant(
        "an unread gradient may be overwritten",
        ORDERING,
        "if not cell.reads:",
        "if False:",
        "unit/planners/test_slots.py",
    ),
    mutant("a group is not side by side in every stay", GROUPS, " or not follows:", ":", PLANS, "unit/plan", VERIFY),
    mutant("all weights are one mapping", GROUPS, "            span += 1\n", "", "unit/assembly/test_build.py"),
    mutant(
        "what is apart on the host is copied as one",
        RESIDENCY,
        "return other.host.data_ptr() == one.host.data_ptr() + one.room",
        "return True",
        "unit/execute/memory",
    ),
    mutant(
        "a stay over the end of an iteration is not there at its start",
        COPIES,
        "self.arrival > self.stay.end",
        "self.arrival > self.stay.end + 1",
        PLANS,
        "unit/plan",
    ),
    mutant(
        "a copy is thought to be gone",
        COPIES,
        "else step >= start or step <= end",
        "else step >= start and step <= end",
        PLANS,
        "unit/plan",
    ),
    mutant(
        "nobody waits for a gradient that the backward writes",
        OPS,
        "            self.computed[step] = (out,)\n",
        "",
        PLANS,
        "parity/engine/test_zero_copy_plans.py",
    ),
    mutant(
        "gradients do not wait for the adding of the last pass",
        LINK,
        "                waits.update(e.adds(t))\n",
        "                pass\n",
        PLANNED_WINDOWS,
        WINDOWS,
    ),
    mutant(
        "an update does not wait for its weight where nothing computes",
        LINK,
        'waits.update(*(e.fetches[copy] for t in op.tensors for copy in e.copies_of["weight", t]))',
        "pass",
        PLANNED_WINDOWS,
        CLIPPED_WINDOWS,
    ),
    mutant(
        "sums are copied to the host when they have been used",
        OPS,
        'self._move("offload", step, "sum", copies, ADDING)',
        'self._move("offload", step, "sum", copies, self.every)',
        PLANNED_WINDOWS,
    ),
)

MEMORY = (
    mutant(
        "a copy to the host does not wait for who computes",
        RESIDENCY,
        "after=[self._device.mark(), *distinct(",
        "after=[*distinct(",
        ENGINE,
        LOOPS,
    ),
    mutant(
        "a copy to the device does not wait for the host's update",
        RESIDENCY,
        "there wait for them.\n            after=complete_on_host(items),",
        "there wait for them.\n            after=[],",
        ENGINE,
        WINDOWS,
    ),
    mutant(
        "what the host has overtaken is used",
        LIVE,
        "self._overtaken = self.buffer is not None",
        "pass",
        "unit/execute/memory",
    ),
    mutant(
        "what the device has changed is lost", LIVE, "self.newer_on_device = self.buffer is not None", "pass", ENGINE
    ),
    mutant(
        "a range is given back while it is copied to the host",
        LIVE,
        "copies = {self.device_ready: None, self._leaving: None}",
        "copies = {self.device_ready: None}",
        ENGINE,
        "unit/execute/memory",
        LOOPS,
    ),
    mutant(
        "host memory of activations is overwritten while it is read",
        ACTIVATIONS,
        ", *([] if used is None else [used])]",
        "]",
        "unit/execute/memory",
    ),
    mutant(
        "activations are let go of while they leave",
        ACTIVATIONS,
        "self.device.wait(self._left, writes=[self._leaving[0]])",
        "pass",
        ENGINE,
        "unit/execute/memory",
    ),
    mutant(
        "an input that travels may be written to",
        ACTIVATIONS,
        "if version(tensor) != known:",
        "if False:",
        "parity/reruns",
        TRAPS,
        "faults/test_saved_tensors.py",
    ),
    mutant(
        "a snapshot changes while it is read",
        SNAPSHOTS,
        "if not (contents.busy or contents.copying) and",
        "if not contents.copying and",
        "unit/execute/memory",
    ),
    mutant(
        "what is needed next is evicted",
        STREAMING,
        "kept = set(needed)",
        "kept = set[LiveGroup]()",
        "unit/execute/memory",
    ),
    mutant(
        "a parameter stays a view of the arena",
        STREAMING,
        "                weight.param.data = weight.host\n",
        "                pass\n",
        "parity/users/test_parameters.py",
        "parity/lightning/test_lightning.py",
    ),
)

UPDATES = (
    mutant(
        "a tied weight has half of its gradient",
        GRADIENTS,
        "weight.grad = grad if weight.grad is None else weight.grad.add_(grad)",
        "weight.grad = grad",
        "parity/users/test_hooks.py",
        "parity/engine/test_traps.py",
    ),
    mutant(
        "an update on the host does not wait for the host copy",
        HOST_TASK,
        "distinct([*self.after, *complete_on_host(groups)])",
        "distinct(self.after)",
        CLIPPED_WINDOWS,
        LOOPS,
    ),
    mutant(
        "the last micro-batch replaces the sum",
        GRADIENTS,
        "total.view.add_(grad) if total.filled else total.view.copy_(grad)",
        "total.view.copy_(grad)",
        LOOPS,
        WINDOWS,
        "parity/lightning/test_windows.py",
        "parity/windows/test_norms.py",
    ),
    mutant(
        "an update that settles does not wait for who reads the weight",
        GRADIENTS,
        "task.after += [self.device.mark(), *(group.last_fetch for group in task.groups)]",
        "pass",
        CLIPPED_WINDOWS,
        "parity/lightning/test_clipping.py",
    ),
    mutant(
        "gradients arrive before the last ones have been used",
        SLOTS,
        "*freed, *complete_on_host([",
        "*complete_on_host([",
        ENGINE,
        "parity/engine/test_planned.py",
        "parity/engine/test_engine.py",
    ),
    mutant(
        "gathered gradients arrive at another's place",
        SLOTS,
        "if grads.keys() >= {*indices}:",
        "if True:",
        TRAPS,
        "parity/users/test_odd_parameters.py",
        "parity/users/test_weights_in_the_loss.py",
    ),
    mutant(
        "a learning rate that is a tensor is not copied",
        "model/optimizers.py",
        "return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()",
        "return {k: v for k, v in group.items()",
        "unit/execute/updates",
    ),
    mutant(
        "a snapshot is not told of an update",
        OPTIMIZER,
        "        self.snapshots.changing(chain.from_iterable(held))",
        "        pass",
        "unit/execute/updates",
    ),
    mutant(
        "states are in another order than plain PyTorch's",
        OPTIMIZER,
        "state.update(ordered)",
        "state.update(reversed(ordered))",
        "unit/execute/updates",
    ),
    mutant(
        "an update uses the options after the step",
        OPTIMIZER,
        "(self._frozen[0] if self._frozen is not None else self.optimizer.param_groups)[group]",
        "self.optimizer.param_groups[group]",
        "unit/execute/updates",
    ),
    mutant(
        "an update comes after the first pass of a micro-batch",
        MICRO_BATCHES,
        "not self.delayed and not waiting else",
        "not self.delayed else",
        "unit/execute/test_iteration.py",
    ),
)

BLOCKS = (
    mutant(
        "the second product of an adapter is kept",
        SAVING,
        "_WIDER * inner <= width",
        "_WIDER * inner < 0",
        "unit/model/test_saving.py",
    ),
    mutant(
        "a second run draws other numbers",
        BLOCK_RUN,
        "device.set_rng_state(part.rng)",
        "pass",
        ENGINE,
        "parity/engine/test_reruns.py",
    ),
    mutant(
        "a second run leaves the generators behind",
        BLOCK_RUN,
        "device.set_rng_state(now)",
        "pass",
        ENGINE,
        "parity/engine/test_reruns.py",
    ),
    mutant(
        "a mask may be rewritten between two runs",
        BLOCK_RUN,
        "            if version(x) != known:\n                raise limits.REWRITTEN",
        "            if False:\n                raise limits.REWRITTEN",
        "parity/reruns/test_callers.py",
    ),
    mutant(
        "a shared input loses a gradient",
        BLOCK_RUN,
        "                pairs.append((entry, total.gradient))\n",
        "",
        "parity/models/test_shared_inputs.py",
        "parity/users/test_block_outputs.py",
    ),
    mutant("a shared input is not one", SHARED, "total.users += 1", "pass", "parity/models/test_shared_inputs.py"),
    mutant(
        "a second run is outside its contexts",
        BLOCK_RUN,
        "if not self._ambient.keeps and (not self._ran or self._ambient == ambient()):",
        "if True:",
        "parity/users/test_contexts.py",
        "parity/lightning/test_mixed_precision.py",
    ),
    mutant(
        "a hook of a weight reads what is out of date",
        GUARD,
        "            self._residency.bring_home(one.groups)\n",
        "",
        "parity/users/test_gradients.py",
        "parity/users/test_parameters.py",
    ),
    mutant(
        "what a user has written is not fetched",
        GUARD,
        "self._residency.forget(dict.fromkeys(group for one in written for group in one.groups))",
        "pass",
        "parity/users/test_hooks.py",
    ),
    mutant(
        "a view of NumPy's is out of date",
        GUARD,
        "        for owned in (*self._views, *self._unseen):\n            self._residency.bring_home(owned.groups)",
        "        pass",
        "parity/users/test_gradients.py",
        "parity/users/test_hooks.py",
    ),
    mutant(
        "a gradient that was set to None updates",
        GRADIENT_VIEW,
        "        if grad is None:\n            total.use_up()",
        "        if grad is None:\n            pass",
        "parity/callbacks/test_gradients.py",
        LOOPS,
    ),
    mutant(
        "a gradient that was kept changes",
        GRADIENT_VIEW,
        "tensor.data = tensor.data.clone()",
        "pass",
        "parity/callbacks/test_gradients.py",
        LOOPS,
    ),
    mutant(
        "weights of two steps may be read",
        ITERATION,
        "        if self.halfway:\n            raise limits.HALFWAY.error(use)\n",
        "",
        "unit/execute/test_iteration.py",
    ),
    mutant(
        "a checkpoint of a broken iteration is written",
        ITERATION,
        "self._left = self.unfinished()",
        "self._left = None",
        "unit/execute/test_iteration.py",
    ),
)

AROUND = (
    mutant(
        "a plan that takes over has another budget",
        REPLAN,
        "memory=plan.budget_bytes, solver_time_limit=limit",
        "solver_time_limit=limit",
        "unit/strategy/test_replan.py",
        "parity/lightning/test_replan.py",
    ),
    mutant(
        "batches count twice after a resume",
        RESUME,
        "    fetcher.fetched -= count  # Lightning adds them itself\n",
        "",
        "parity/lightning/test_resume.py",
    ),
    mutant(
        "a validation that is done again draws other numbers",
        RESUME,
        "states = self._before_validation if validating else _states(trainer, pl_module)",
        "states = _states(trainer, pl_module)",
        "parity/lightning/test_resume.py",
    ),
    mutant(
        "the trial's logs are the run's",
        SAMPLE,
        '        for name in ("log", "log_dict"):\n',
        "        for name in ():\n",
        "unit/strategy/test_sample.py",
    ),
    mutant(
        "a damaged checkpoint is read",
        SUMS,
        "    if damaged:",
        "    if False:",
        "unit/strategy/test_sums.py",
    ),
    mutant(
        "a hyperparameter keeps the batch size of before",
        BATCH_SIZE,
        'if isinstance(hyperparameters, Mapping) and "batch_size" in hyperparameters:',
        'if not holders and isinstance(hyperparameters, Mapping) and "batch_size" in hyperparameters:',
        "parity/lightning/test_batch_size.py",
    ),
    mutant(
        "activations that leave count as saved",
        COST,
        ".more(saved=-moving, forward=moving, backward=moving)",
        ".more(forward=moving, backward=moving)",
        "unit/profiling/test_measure.py",
        "unit/profiling/test_agrees_with_engine.py",
    ),
    mutant(
        "the emptiest draw is measured",
        COST,
        "return max(runs, key=",
        "return min(runs, key=",
        "unit/profiling/test_grad_mode.py",
    ),
    mutant(
        "states that grow are not waited for",
        STATES,
        'held = max(held, _tried(self._sample(parameter), torch.device("cpu"), _state_after_steps))',
        "pass",
        "unit/profiling/test_optimizer.py",
    ),
    mutant(
        "an update that stacks tensors is measured with one",
        STATES,
        "    for copies in (1, 2):\n",
        "    for copies in (1,):\n",
        "unit/profiling/test_optimizer.py",
        "parity/optimizers/test_own.py",
    ),
    mutant(
        "a document is predicted from the one before",
        PACKING,
        "            labels[positions == 0] = IGNORED\n",
        "            pass\n",
        "unit/finetune/data/batches/test_apart.py",
        "unit/finetune/data/batches",
    ),
    mutant(
        "another bin with the same room is taken",
        PACKING,
        "waiting[room].popleft()",
        "waiting[room].pop()",
        "unit/finetune/data/batches",
    ),
    mutant(
        "a loss is multiplied and not undivided",
        LOSS,
        "return loss / (torch.ones_like(loss.detach()) / count)",
        "return loss * count",
        "unit/finetune/test_loss.py",
    ),
    mutant(
        "a key that is there twice passes",
        ROWS,
        "    if len(made) != len(pairs):\n",
        "    if False:\n",
        "unit/finetune/data/test_rows.py",
    ),
    mutant(
        "an evaluation stays beside the training where there is no room",
        RUN,
        "return took is not None and took <=",
        "return took is not None or took <=",
        "parity/hf/test_trainer.py",
    ),
    mutant(
        "a larger batch does not lead to another plan",
        FIRST_PLAN,
        "return self.growth.outgrown(self.plan, batch, padded)",
        "return None",
        "parity/callbacks/test_growing.py",
    ),
    mutant(
        "a plan for the batch that came last has no room for those before",
        FIRST_PLAN,
        "return largest([before, profile])",
        "return profile",
        "unit/hf/test_planning.py",
    ),
    mutant(
        "what was put in place of a gradient is lost where another plan goes on",
        HANDOVER,
        "self._view.use_shown_sums()",
        "pass",
        "parity/hf/test_same_calls.py",
    ),
    mutant(
        "a Trainer that trains again keeps its plan",
        RUN,
        "        self._forget_plan(self.run_before)\n",
        "",
        "parity/hf/test_trainer.py",
    ),
)

HEADS = (
    mutant(
        "gradients of a loss in chunks are those of the loss alone",
        HEAD,
        "None if tensor is None else _times(tensor, grads[0])",
        "tensor",
        "unit/model/test_head.py",
    ),
    mutant(
        "gradients are made where no backward can come",
        HEAD,
        "[backward and need for need",
        "[need for need",
        "unit/model/test_head.py",
    ),
    mutant(
        "rows of heads alone are cut as those of samples and heads",
        PARTS,
        'name != "alibi" or ',
        "",
        "unit/model/test_parts.py",
    ),
    mutant(
        "gradients that a forward has made do not count",
        COST,
        "plain.more(saved=-made, forward=made, backward=made)",
        "plain.more(saved=-made, backward=made)",
        "parity/engine/test_head_budgets.py",
    ),
)

MUTANTS = (
    *PLANNING,
    *MEMORY,
    *UPDATES,
    *CLIPPED,
    *IN_TWO_PARTS,
    *BLOCKS,
    *AROUND,
    *HEADS,
    *BETWEEN_MACHINES,
    *IN_PROCESSES,
)
