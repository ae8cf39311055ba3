"""A type for every tensor that fits a size, or a KL divergence, and loses least.

The loss of a tensor is taken as sensitivity x relative error of its output (see `errors`): independent small errors add
up in the KL divergence, which is quadratic in them. Errors are measured per tensor and type. A sensitivity is that of
the kind of weight times that of the layer; each is measured by a trial file in which that kind, or those layers, alone
have fewer bits. Errors also work on each other, so afterwards the sensitivity of one kind after the other is raised and
lowered, and what gives a better file is kept. Without trials sensitivities come from `PRIORS`. Everything is
deterministic.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgellama.errors import DoesNotFitError, UsageError
from edgellama.gguf_io import GGMLType as T
from edgellama.gguf_io import TensorInfo
from edgellama.quantize import allocate, errors, layout
from edgellama.quantize.api import Job, cores
from edgellama.quantize.choice import Decision, category, tensor_order
from edgellama.quantize.options import Options
from edgellama.quantize.protect import protect, protection

MeasureKld = Callable[[Path], float]
"""Mean KL divergence of a model file from the source, on a calibration text."""
OnStep = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    sample_weights: int
    """Weights looked at per tensor and type."""
    bands: int
    """Bands of layers measured apart; 0 for no trial files at all."""
    rounds: int
    """How often each kind's sensitivity is tried higher and lower."""


EFFORTS = {
    "quick": Effort(1 << 17, 0, 0),
    "normal": Effort(1 << 18, 6, 0),
    "high": Effort(1 << 19, 15, 1),
    "max": Effort(1 << 20, 1000, 2),
}
PRIORS = {"up": 0.14, "down": 0.14, "gate": 0.08, "v": 0.07, "qkv": 0.07, "attn_output": 0.07, "k": 0.04, "q": 0.03}
"""Sensitivities of one tensor of 30 like it, measured on SmolLM2-135M."""
_OTHER_PRIOR, _OUTPUT_PRIOR, _PRIOR_LAYERS = 0.1, 9.0, 30
_TRIAL_RECIPE = "Q8_0"
_STEP = 1.6
"""Factor by which a sensitivity is tried higher and lower."""
_LEAST_SHARE = 0.02
"""Least share of the mean sensitivity: noise must not make a group free."""
_KLD_ROUNDS = 5
_RECIPES = ((2.9, "Q2_K"), (3.6, "Q3_K_S"), (4.0, "Q3_K_M"), (4.7, "Q4_K_S"), (5.3, "Q4_K_M"), (5.6, "Q5_K_S"))
"""Bits per weight up to which a file says it has that recipe's file type."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One of: bytes of the whole file, bits per weight of all tensors, mean KL divergence on the calibration text."""

    file_bytes: int | None = None
    bits_per_weight: float | None = None
    max_kld: float | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.file_bytes, self.bits_per_weight, self.max_kld) if x is not None]
        if len(given) != 1:
            raise UsageError("one goal is needed: --target-size, --target-bpw or --max-kld")
        if not given[0] > 0:
            raise UsageError(f"the goal is {given[0]}, it must be positive")


@dataclass(frozen=True, slots=True)
class Row:
    """One decision."""

    name: str
    group: str
    type: T
    nbytes: int
    error: float
    """Relative squared error of its output."""
    loss: float
    """Expected share of the KL divergence, or of the whole loss where nothing was measured."""


@dataclass(slots=True)
class Plan:
    """What was decided, and why."""

    recipe: str
    rows: list[Row]
    sensitivities: dict[str, float]
    file_bytes: int
    predicted_kld: float | None
    """None without trials."""
    measured_kld: float | None = None
    trials: dict[str, float] = field(default_factory=dict)
    """Measured KL divergence of each trial file."""

    @property
    def types(self) -> dict[str, T]:
        """Type by tensor name, for `Options.types`."""
        return {row.name: row.type for row in self.rows}

    def record(self) -> dict[str, Any]:
        """As plain data, for the sidecar."""
        return {
            "recipe": self.recipe,
            "file_bytes": self.file_bytes,
            "predicted_kld": self.predicted_kld,
            "measured_kld": self.measured_kld,
            "trials": self.trials,
            "sensitivities": self.sensitivities,
            "tensors": [
                {"name": r.name, "group": r.group, "type": r.type.name, "bytes": r.nbytes}
                | {"error": r.error, "loss": r.loss}
                for r in self.rows
            ],
        }


class Optimizer:
    """Finds a `Plan` for a source file."""

    def __init__(
        self,
        source: str | Path,
        options: Options,
        *,
        effort: str = "normal",
        measure_kld: MeasureKld | None = None,
        workspace: Path | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        if effort not in EFFORTS:
            raise UsageError(f"--effort {effort} is not known", f"known are {', '.join(EFFORTS)}")
        self._source, self._options = source, options
        self._effort = EFFORTS[effort] if measure_kld else replace(EFFORTS[effort], bands=0, rounds=0)
        self._measure, self._workspace = measure_kld, workspace
        self._tell: OnStep = on_step or (lambda _fraction, _what: None)
        self._job = Job(source, Path("plan.gguf"), replace(options, recipe=_TRIAL_RECIPE, types={}))
        self._tensors = [d.tensor for d in self._job.decisions if self._is_free(d)]
        if not self._tensors:
            raise UsageError(f"{source}: there is no tensor whose type could be chosen")
        self._layers = self._job.header.layers
        self._tied = self._job.header.tensor("output.weight") is None
        self._trials: dict[str, float] = {}

    def _is_free(self, decision: Decision) -> bool:
        """Whether the tensor's type is ours to choose: quantizable, and not fixed by the user."""
        tensor, fixed = decision.tensor, self._options.overrides
        kind = category(tensor.name)
        named = (kind == "output" and fixed.output_type) or (kind == "embedding" and fixed.embedding_type)
        unchanged = decision.type is tensor.type
        return not (unchanged or named or decision.by_pattern) and bool(errors.ladder_of(tensor))

    def run(self, goal: Goal) -> Plan:
        """Decide. Raises DoesNotFitError when the goal is out of reach."""
        table = errors.measure(
            self._tensors,
            self._job.header.paths,
            self._job.weights,
            self._job.true_weights,
            sample_weights=self._effort.sample_weights,
            threads=self._options.threads or cores(),
            on_progress=lambda fraction, name: self._tell(fraction, f"measuring errors: {name}"),
        )
        if goal.max_kld is not None:
            return self._for_kld(goal.max_kld, table)
        bits = goal.bits_per_weight
        whole = sum(d.tensor.elements for d in self._job.decisions)
        limit = goal.file_bytes if bits is None else int(bits * whole / 8) + self._header_bytes()
        if limit is None:
            raise UsageError("no goal is given")
        sensitivities = self._sensitivities(table, T.Q4_K if limit * 8 > 4.1 * whole else T.Q3_K)
        plan = self._plan(table, sensitivities, limit)
        if self._measure is None:
            return plan
        plan.measured_kld = self._try(plan.types, "the first choice")
        return self._improved(table, plan, limit)

    def _header_bytes(self) -> int:
        return sum(len(output.header) for output in self._job.outputs)

    # ---- sensitivities

    def kind(self, tensor: TensorInfo) -> str:
        """Kind of weight; embeddings that are the output too count as output."""
        kind = category(tensor.name)
        return "output" if kind == "embedding" and self._tied else kind

    def band(self, tensor: TensorInfo) -> str:
        """Name of the band of layers a tensor is in, "" outside of the layers."""
        layer, count = tensor_order(tensor.name)[0], min(self._effort.bands, self._layers)
        return f"layers {layer * count // self._layers + 1}/{count}" if layer >= 0 and count > 0 else ""

    def _grouped(self, name_of: Callable[[TensorInfo], str]) -> dict[str, list[TensorInfo]]:
        groups: dict[str, list[TensorInfo]] = {}
        for tensor in self._tensors:
            groups.setdefault(name_of(tensor), []).append(tensor)
        return groups

    def _sensitivity(self, sensitivities: Mapping[str, float], tensor: TensorInfo) -> float:
        return sensitivities[self.kind(tensor)] * sensitivities.get(self.band(tensor), 1.0)

    def _sensitivities(self, table: errors.ErrorTable, probe: T) -> dict[str, float]:
        kinds, bands = self._grouped(self.kind), self._grouped(self.band)
        bands.pop("", None)
        if self._measure is None or not self._effort.bands:
            scale = _PRIOR_LAYERS / max(1, self._layers)
            found = {kind: PRIORS.get(kind, _OTHER_PRIOR) * scale for kind in kinds}
            return found | ({"output": _OUTPUT_PRIOR} if "output" in found else {})
        base, count = self._try({}, "the base of the trials", 0.0), len(kinds) + len(bands)
        known: dict[str, float] = {}
        for groups in (kinds, bands):  # bands are judged relative to what their kinds let expect
            measured: dict[str, float] = {}
            for name, members in groups.items():
                types = {t.name: probe if probe in table[t.name] else errors.ladder_of(t)[0] for t in members}
                number = len(known) + len(measured) + 1
                kld = self._try(types, f"trial {number} of {count}: {name}", number / count)
                expected = sum(
                    known.get(self.kind(t), 1.0) * (table[t.name][types[t.name]] - table[t.name].get(T.Q8_0, 0.0))
                    for t in members
                )
                measured[name] = (kld - base) / expected if expected > 0 else 0.0
            usual = sum(max(0.0, value) for value in measured.values()) / max(1, len(measured))
            if measured and not usual > 0:
                raise UsageError(
                    "the trials show no KL divergence", "measure with a text the model knows, of more chunks"
                )
            known |= {name: max(value, _LEAST_SHARE * usual) for name, value in measured.items()}
        return known

    def _improved(self, table: errors.ErrorTable, best: Plan, limit: int) -> Plan:
        """The best of plans with one kind's sensitivity after the other changed."""
        kinds, rounds = list(self._grouped(self.kind)), self._effort.rounds
        for number, kind in enumerate(kinds * rounds):
            for factor in (_STEP, 1 / _STEP):
                changed = best.sensitivities | {kind: best.sensitivities[kind] * factor}
                plan = self._plan(table, changed, limit)
                if plan.types == best.types:
                    continue
                what = f"step {number + 1} of {len(kinds) * rounds}: {kind} x {factor:.2f}"
                plan.measured_kld = self._try(plan.types, what, number / (len(kinds) * rounds))
                if plan.measured_kld < (best.measured_kld or 0.0):
                    best = plan
                    break
        return best

    def _try(self, types: Mapping[str, T], what: str, fraction: float = 1.0) -> float:
        """Measured divergence of a file with these types, all else at the trial recipe."""
        if self._measure is None:
            raise UsageError("nothing to measure with")
        self._tell(fraction, what)
        with tempfile.TemporaryDirectory(dir=self._workspace, prefix="edgellama-trial-") as folder:
            path = Path(folder) / "trial.gguf"
            Job(self._source, path, replace(self._options, recipe=_TRIAL_RECIPE, types=dict(types), resume=False)).run()
            kld = self._trials[what] = self._measure(path)
        return kld

    # ---- plans

    def _candidates(self, table: errors.ErrorTable, sensitivities: Mapping[str, float]) -> dict[str, list[Any]]:
        rule = protection(self._options.protect) if self._options.protect else None
        found: dict[str, list[Any]] = {}
        for tensor in self._tensors:
            weight = self._sensitivity(sensitivities, tensor)
            offers = [(kind, error) for kind, error in table[tensor.name].items()]
            offers.append((tensor.type, 0.0))
            if rule is not None:
                allowed = [
                    (kind, error)
                    for kind, error in offers
                    if protect([Decision(tensor, kind, kind, False)], rule, self._layers)[0].type is kind
                ]
                offers = allowed or offers[-1:]
            found[tensor.name] = [
                allocate.Candidate(kind, _padded(layout.nbytes_as(tensor, kind)), weight * error)
                for kind, error in offers
            ]
        return found

    def _fixed_bytes(self) -> int:
        """Bytes of a file without the tensors whose type is chosen."""
        names = {tensor.name for tensor in self._tensors}
        others = (d for d in self._job.decisions if d.tensor.name not in names)
        return self._header_bytes() + sum(_padded(layout.nbytes_as(d.tensor, d.type)) for d in others)

    def _plan(self, table: errors.ErrorTable, sensitivities: dict[str, float], limit: int) -> Plan:
        fixed = self._fixed_bytes()
        chosen = allocate.allocate(self._candidates(table, sensitivities), limit - fixed)
        rows = []
        for tensor in self._tensors:
            pick = chosen[tensor.name]
            error = table[tensor.name].get(pick.type, 0.0)
            rows.append(Row(tensor.name, self.kind(tensor), pick.type, pick.nbytes, error, pick.loss))
        size = fixed + sum(row.nbytes for row in rows)
        parameters = sum(tensor.elements for tensor in self._tensors)
        predicted = sum(row.loss for row in rows) if self._trials else None
        bits = sum(row.nbytes for row in rows) * 8 / parameters
        return Plan(_recipe_name(bits), rows, dict(sensitivities), size, predicted, None, self._trials)

    def _for_kld(self, most: float, table: errors.ErrorTable) -> Plan:
        """The smallest file that keeps a divergence: predict, measure, correct the prediction, again."""
        if self._measure is None or not self._effort.bands:
            raise UsageError("--max-kld needs a calibration text and more than --effort quick", "give --text FILE")
        sensitivities = self._sensitivities(table, T.Q4_K)
        factor, best = 1.0, None
        for attempt in range(_KLD_ROUNDS):
            plan = self._smallest(table, sensitivities, most / factor)
            plan.measured_kld = self._try(plan.types, f"attempt {attempt + 1}", attempt / _KLD_ROUNDS)
            if plan.measured_kld <= most and (best is None or plan.file_bytes < best.file_bytes):
                best = plan
            predicted = plan.predicted_kld or most
            if best is plan and plan.measured_kld > 0.97 * most:
                break
            factor = max(1e-3, plan.measured_kld / predicted)
            if best is not plan:
                factor *= 1.01  # a failed attempt must not be repeated
        if best is None:
            raise DoesNotFitError(
                f"no choice of types kept the KL divergence below {most:g}", "allow a larger one, or use Q8_0"
            )
        return best

    def _smallest(self, table: errors.ErrorTable, sensitivities: dict[str, float], most: float) -> Plan:
        """The smallest plan whose predicted divergence is at most `most`, by bisection over the size."""
        candidates = self._candidates(table, sensitivities)
        fixed = self._fixed_bytes()
        low = fixed + sum(min(c.nbytes for c in found) for found in candidates.values())
        high = fixed + sum(max(c.nbytes for c in found) for found in candidates.values())
        while high - low > max(4096, high // 5000):
            middle = (low + high) // 2
            if (self._plan(table, sensitivities, middle).predicted_kld or 0.0) <= most:
                high = middle
            else:
                low = middle
        return self._plan(table, sensitivities, high)


def _padded(nbytes: int) -> int:
    return -(-nbytes // layout.ALIGNMENT) * layout.ALIGNMENT


def _recipe_name(bits: float) -> str:
    """The recipe whose file type a file of so many bits per weight should name."""
    for most, name in _RECIPES:
        if bits <= most:
            return name
    return "Q5_K_M" if bits <= 6.2 else "Q6_K" if bits <= 7.5 else "Q8_0"
