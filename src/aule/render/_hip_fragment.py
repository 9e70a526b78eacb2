"""Matrix fragments in HIP: 16 x 16 x 16 products by v_mfma (gfx908, 90a, 942, 950) and v_wmma (gfx11, gfx12).

A fragment is a vector of a lane's components. These instructions do not load matrices, so loads and stores are written
for the layouts that AMD documents (`aule.target`), and a probe verifies a product on the device before use.

The order of a sum is free as long as both factors have the same: on gfx908, which multiplies eight columns of bf16 at
a time, the first product takes the first half of each lane's components, and on gfx950 one product of depth 32 takes
the components of two of ours.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.types import Fragment, Pointer, Scalar, ValueType, Vector, bf16, f16, f32, u16
from aule.render import _hip_prelude as prelude
from aule.render.clike import Expr
from aule.render.clike_c import CPrinter
from aule.target import CDNA_LAYOUTS, RDNA3_LAYOUTS, RDNA4_LAYOUTS, FragmentLayout, Target

_SIZE = 16
_USES = ("accumulator", "a", "b")
_USING = frozenset({"set", "fragment_get", "fragment_store", "barrier", "if", "loop"})
"""Operations before which sums must be complete."""


@dataclass(frozen=True)
class Unit:
    """The matrix unit of an instruction set.

    Attributes
    ----------
    layouts : tuple of FragmentLayout
        Of accumulators, left and right factors.
    products : dict
        The function of `_hip_prelude` for each type of factors.
    deep : dict
        The same for products of twice the depth.
    """

    layouts: tuple[FragmentLayout, ...]
    products: dict[Scalar, str]
    deep: dict[Scalar, str]


def unit_of(arch: str, wave: int) -> Unit | None:
    """The matrix unit of an architecture for waves of a size; None if it has none."""
    layouts: tuple[FragmentLayout, ...] | None = None
    suffix, deep = "", {}
    match prelude.generation(arch):
        case 9 if arch in ("gfx908", "gfx90a", "gfx942", "gfx950") and wave == 64:
            products = {f16: "mfma_f32_16x16x16_f16", bf16: "mfma_f32_16x16x16_bf16"}
            if arch == "gfx908":
                products[bf16] = "mfma_f32_16x16x8_bf16"
            if arch == "gfx950":
                deep = {f16: "mfma_f32_16x16x32_f16", bf16: "mfma_f32_16x16x32_bf16"}
            return Unit(CDNA_LAYOUTS, products, deep)
        case 11:
            layouts = RDNA3_LAYOUTS.get(wave)
        case 12 if wave == 32:
            layouts, suffix = RDNA4_LAYOUTS, "_gfx12"
    if layouts is None:
        return None
    names = {elem: f"wmma_f32_16x16x16_{elem}_w{wave}{suffix}" for elem in (f16, bf16)}
    return Unit(layouts, names, {})


class FragmentPrinter(CPrinter):
    """Adds matrix fragments to the C printer."""

    arch: str
    wave: int

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        super().__init__(kernel, target)
        self._waiting: dict[Value, Op] = {}
        """Products that will be part of the next product of their sum, by their results."""
        self._loose: list[Value] = []
        """Sums that are complete, but not yet used."""

    @abstractmethod
    def function(self, name: str, *args: str, template: str = "") -> Expr:
        """A call of a function of the prelude."""

    # -- types -----------------------------------------------------------------------------------------------------

    def type_name(self, type_: ValueType) -> str:
        if isinstance(type_, Fragment):
            return self.type_name(Vector(_held(type_.elem), self._layout(type_).parts))
        return super().type_name(type_)

    def _unit(self) -> Unit:
        unit = unit_of(self.arch, self.wave)
        if unit is None:
            raise KernelError(
                f"{self.kernel.name}: expected a target with matrix units for waves of {self.wave}, got {self.arch}; "
                "plan the kernel without fragments"
            )
        return unit

    def _layout(self, type_: Fragment) -> FragmentLayout:
        allowed = (f32,) if type_.use == "accumulator" else (f16, bf16)
        if (type_.rows, type_.cols) != (_SIZE, _SIZE) or type_.elem not in (*allowed, f16, bf16):
            raise KernelError(
                f"{self.kernel.name}: expected fragments of 16 x 16, factors of f16 or bf16 and accumulators of f32, "
                f"got {type_}; plan the kernel for such fragments"
            )
        return self._unit().layouts[_USES.index(type_.use)]

    # -- operations ------------------------------------------------------------------------------------------------

    def fragment(self, op: Op) -> Expr:
        match op.opcode:
            case "fragment_get":
                return Expr(f"{self.operand(op.args[0])}[{op.attrs['component']}]")
            case "fragment_length":
                return Expr(str(self._layout(_fragment(op.args[0])).parts))
            case "fragment_mma":
                return self._multiply(op)
            case "fragment_load":
                return Expr(f"{self._load(op)}({self.address(op.args[0], op.args[1])}, {self.bare(op.args[2])})")
            case "fragment_fill":
                parts = [self.named(op.args[0])] * self._layout(_fragment(op.output)).parts
            case "fragment_pack":
                parts = self._all_parts(op)
            case _:
                component, value = op.attrs["component"], self.bare(op.args[1])
                name = self.named(op.args[0])
                count = self._layout(_fragment(op.output)).parts
                parts = [value if i == component else f"{name}[{i}]" for i in range(count)]
        return Expr(f"{self.type_name(_fragment(op.output))}{{{', '.join(parts)}}}")

    def _all_parts(self, op: Op) -> list[str]:
        count = self._layout(_fragment(op.output)).parts
        if len(op.args) != count:
            raise KernelError(
                f"{self.kernel.name}: expected {count} components of {op.output.type}, got {len(op.args)}; trace the "
                f"kernel for {self.arch}"
            )
        return [self.bare(value) for value in op.args]

    def cast(self, value: Value, type_: ValueType, result: Value) -> Expr:
        if not isinstance(type_, Fragment):
            return super().cast(value, type_, result)
        source, name = _fragment(value), self.named(value)
        parts = []
        for i in range(self._layout(type_).parts):
            part = f"{name}[{i}]"
            if source.elem == bf16:
                part = self.function("bits", f"(u32){part} << 16", template="<f32>").text
            parts.append(self.function("round_bf16", part).text if type_.elem == bf16 else f"({type_.elem}){part}")
        return Expr(f"{self.type_name(type_)}{{{', '.join(parts)}}}")

    def declare(self, type_: ValueType, name: str, init: str | None, mutable: bool = False) -> str:
        return super().declare(type_, name, init, mutable or isinstance(type_, Fragment))

    def statement(self, op: Op) -> None:
        if op.opcode in _USING:
            # The compiler may move products behind a barrier or a branch, but not the loads of their factors: all of
            # those would stay in registers.
            self.emit(*(f"AULE_HERE({self.bare(value)});" for value in self._loose))
            self._loose.clear()
        if op.opcode == "fragment_mma" and self._joins_next(op):
            for value in op.args:
                if value in self._pending:  # the variable that holds it may change until then
                    del self._pending[value]
                    self._define(value, self._text[value])
            self._waiting[op.output] = op
        else:
            super().statement(op)
            if op.opcode == "fragment_mma" and all(user.opcode != "fragment_mma" for user in self.users(op.output)):
                self._loose.append(op.output)

    def _joins_next(self, op: Op) -> bool:
        """Whether a product and the next one of its sum can be one of twice the depth."""
        users = self.users(op.output)
        return (
            _fragment(op.args[0]).elem in self._unit().deep
            and op.args[2] not in self._waiting
            and len(users) == 1
            and users[0].opcode == "fragment_mma"
            and users[0].args[2] is op.output
            and self._home[id(users[0])] == self._home[id(op)]
        )

    def _multiply(self, op: Op) -> Expr:
        a, b, total = op.args
        elem, unit = _fragment(a).elem, self._unit()
        if elem not in unit.products:
            raise KernelError(f"{self.kernel.name}: expected factors of f16 or bf16, got {elem}; convert them")
        if total not in self._waiting:
            return self.function(unit.products[elem], *(self.bare(x) for x in (a, b, total)))
        first = self._waiting[total]
        wide = self.type_name(Vector(_held(elem), 2 * self._layout(_fragment(a)).parts))
        joined = (
            self.function("join", self.bare(x), self.bare(y), template=f"<{wide}>").text
            for x, y in zip(first.args[:2], (a, b), strict=True)
        )
        return self.function(unit.deep[elem], *joined, self.bare(first.args[2]))

    # -- memory ----------------------------------------------------------------------------------------------------

    def fragment_store(self, op: Op) -> list[str]:
        value = op.args[3]
        place = f"{self.address(op.args[0], op.args[1])}, {self.bare(op.args[2])}"
        return [f"{self._store(op, _fragment(value))}({place}, {self.bare(value)});"]

    def _load(self, op: Op) -> str:
        """Name of the function that loads such a fragment; it is added to the source."""
        type_ = _fragment(op.output)
        vector, runs = self.type_name(type_), self._runs(type_, op.attrs["layout"])
        name, elem = f"load_{type_.use}_{type_.elem}_{op.attrs['layout']}", _held(type_.elem)
        lines = []
        if len(runs) == 1:
            lines.append(f"return *(const {vector}*)(p + {runs[0][0]});")
        elif len(runs[0][1]) == 1:
            lines.append(f"return {vector}{{{', '.join(f'p[{at}]' for at, _ in runs)}}};")
        else:
            piece = self.type_name(Vector(elem, len(runs[0][1])))
            lines += [f"const {piece} run{i} = *(const {piece}*)(p + {at});" for i, (at, _) in enumerate(runs)]
            where = {part: f"run{i}[{j}]" for i, (_, parts) in enumerate(runs) for j, part in enumerate(parts)}
            lines.append(f"return {vector}{{{', '.join(where[part] for part in sorted(where))}}};")
        self._transfer(name, op, type_, f"const {elem}* p, i32 stride", vector, lines)
        return name

    def _store(self, op: Op, type_: Fragment) -> str:
        vector, runs = self.type_name(type_), self._runs(type_, op.attrs["layout"])
        name, elem = f"store_{type_.use}_{type_.elem}_{op.attrs['layout']}", _held(type_.elem)
        lines = []
        for at, parts in runs:
            lines += [f"p[{at}{f' + {i}' if i else ''}] = x[{part}];" for i, part in enumerate(parts)]
        self._transfer(name, op, type_, f"{elem}* p, i32 stride, {vector} x", "void", lines)
        return name

    def _transfer(self, name: str, op: Op, type_: Fragment, arguments: str, result: str, lines: list[str]) -> None:
        """Add a function on the memory of a fragment, in which ``p`` is the place of the lane's first component."""
        assert isinstance(op.args[0].type, Pointer)
        layout = self._layout(type_)
        lane = self.function("lane_id").text
        by_row = op.attrs["layout"] == "row"
        along, across = (layout.lane_cols, layout.lane_rows) if by_row else (layout.lane_rows, layout.lane_cols)
        terms = [f"{_weighed(across)} * stride", _weighed(along)]
        place = f"p += {' + '.join(term for term in terms if not term.startswith('0'))};"
        body = "".join(f"    {line}\n" for line in (f"const i32 lane = {lane};", place, *lines))
        self.helpers[name] = f"AULE_DEVICE {result} {name}({arguments})\n{{\n{body}}}"

    def _runs(self, type_: Fragment, order: str) -> list[tuple[str, list[int]]]:
        """Places of a lane's components in memory, from its first: neighbours together, with their numbers."""
        layout = self._layout(type_)
        places = sorted(
            (row, col, part) if order == "row" else (col, row, part)
            for part in range(layout.parts)
            for row, col in [layout.place(0, part)]
        )
        found: list[tuple[int, int, list[int]]] = []
        for line, at, part in places:
            if found and found[-1][0] == line and found[-1][1] + len(found[-1][2]) == at:
                found[-1][2].append(part)
            else:
                found.append((line, at, [part]))
        text = {False: "{line} * stride + {at}", True: "{at}"}
        return [(text[line == 0].format(line=line, at=at), parts) for line, at, parts in found]


def _fragment(value: Value) -> Fragment:
    assert isinstance(value.type, Fragment)
    return value.type


def _held(elem: Scalar) -> Scalar:
    """The type of components: bf16 is held as bits."""
    return u16 if elem == bf16 else elem


def _weighed(weights: tuple[int, ...]) -> str:
    """The sum of the weights of the bits of ``lane``: runs of bits with doubling weights are one term."""
    terms, i = [], 0
    while i < len(weights):
        width = 1
        while i + width < len(weights) and weights[i] and weights[i + width] == weights[i] << width:
            width += 1
        if weights[i]:
            shifted = f"(lane >> {i} & {(1 << width) - 1})" if i else f"(lane & {(1 << width) - 1})"
            terms.append(shifted if weights[i] == 1 else f"{shifted} * {weights[i]}")
        i += width
    return f"({' + '.join(terms)})" if len(terms) > 1 else terms[0] if terms else "0"
