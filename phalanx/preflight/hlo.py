"""What XLA's optimized program says, read from its text: collectives, reused buffers, sizes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx import _jax

_BITS = {
    "pred": 8,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
    "f8e4m3": 8,
    "f8e4m3b11fnuz": 8,
    "f8e4m3fnuz": 8,
    "f8e5m2fnuz": 8,
    "f8e3m4": 8,
    "f8e8m0fnu": 8,
    "f4e2m1fn": 4,
}
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,<=]*)\]")
_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_OF_A_TEST = frozenset({"parameter", "get-tuple-element", "constant", "compare", "convert", "copy", "bitcast"})
"""What the condition of a loop is made of that only counts."""
_GRADIENT = re.compile(r"gradient of (.+?)(?:/psum|/reduce_sum|$)", re.S)


@dataclass(frozen=True)
class Collective:
    """One exchange between the devices."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute."""
    dtype: str
    bytes: int
    """What it reduces or moves, in one step: of the whole result where each device gives a part."""
    source: str
    """The variable whose gradient it is, or the user's line."""
    group_size: int
    """Devices that take part together."""
    groups: str
    """As XLA writes them."""
    network: str
    """'ICI' inside a slice, 'DCN' between slices, '' elsewhere."""
    count: int
    """How often it runs in one step."""
    shapes: tuple[tuple[int, ...], ...] = ()
    operation: str = ""
    """XLA's name of the exchange, which may carry several of these together."""


@dataclass(frozen=True)
class Instruction:
    """One line of the program."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    """Names; of a constant, what it is."""
    attributes: str


class Module:
    """The optimized program of one device."""

    def __init__(self, text: str) -> None:
        header, _, body = text.partition("\n")
        self.header = header
        self._frames = _Frames(text)
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._parse(body)

    def _parse(self, body: str) -> None:
        inside: list[Instruction] | None = None
        for line in body.splitlines():
            if inside is None:
                start = re.match(r"(ENTRY )?%([^\s(]+) \(.*\{$", line)
                if start:
                    inside = self.computations.setdefault(start[2], [])
                    if start[1]:
                        self.entry = start[2]
            elif line.startswith("}"):
                inside = None
            else:
                instruction = _instruction(line)
                if instruction is not None:
                    inside.append(instruction)

    # ---- what runs how often ----

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation runs in one step; loops of unknown length count once."""
        found: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            found[name] = found.get(name, 0) + times
            instructions = self.computations.get(name, ())
            for instruction in instructions:
                factor = self._trips(instruction, instructions) if instruction.opcode == "while" else 1
                for callee in _calls(instruction):
                    visit(callee, times * factor)

        visit(self.entry, 1)
        return found

    def _trips(self, loop: Instruction, around: Sequence[Instruction]) -> int:
        """How often a loop runs: as XLA says, or else as it counts from constant to constant; 1 if neither is known."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        condition, body = (
            self.computations.get(_callees(key, loop.attributes)[0], []) for key in ("condition", "body")
        )
        tests, result = [i for i in condition if "direction=LT" in i.attributes], body[-1]
        if len(tests) != 1 or any(i.opcode not in _OF_A_TEST for i in condition) or result.opcode != "tuple":
            return 1
        test = tests[0]
        outside, inside, tested = ({i.name: i for i in part} for part in (around, body, condition))
        counter, given = tested.get(test.operands[0]), outside.get(loop.operands[0])
        place = re.search(r"\bindex=(\d+)", counter.attributes) if counter else None
        if place is None or given is None or given.opcode != "tuple":
            return 1
        start = _constant(given.operands[int(place[1])], outside)
        end = _constant(test.operands[1], tested)
        following = inside.get(result.operands[int(place[1])])
        steps = [_constant(o, inside) for o in following.operands] if following and following.opcode == "add" else []
        step = next((s for s in steps if s), None)
        if start is None or end is None or step is None:
            return 1
        return max(0, -(-(end - start) // step))

    @property
    def has_loops(self) -> bool:
        """Whether something runs more than once."""
        return any(times > 1 for times in self.runs.values())

    # ---- collectives ----

    def collectives(self, num_devices: int, num_slices: int, platform: str) -> list[Collective]:
        """All exchanges between devices, the largest first."""
        found = []
        for name, times in self.runs.items():
            instructions = self.computations.get(name, [])
            by_name = {i.name: i for i in instructions}
            for instruction in instructions:
                kind = _kind(instruction)
                if kind is not None:
                    context = _Context(instructions, by_name, self._frames)
                    found += list(_collectives(kind, instruction, context, times, num_devices, num_slices, platform))
        return sorted(found, key=lambda c: -c.bytes * c.count)

    # ---- buffers ----

    @functools.cached_property
    def reused_inputs(self) -> frozenset[int]:
        """Which inputs' buffers hold an output."""
        aliases = _braced(self.header, "input_output_alias=")
        return frozenset(int(i) for i in re.findall(r":\s*\((\d+)", aliases))

    @property
    def has_dynamic_shapes(self) -> bool:
        """Whether a size is known at run time only."""
        return any("<=" in i.shape for instructions in self.computations.values() for i in instructions)

    def line_of(self, instruction: Instruction) -> str:
        """The user's line, if known."""
        return self._frames.line(instruction)


# ---- parsing lines -------------------------------------------------------------------------------


def _instruction(line: str) -> Instruction | None:
    name, found, rest = line.strip().partition(" = ")
    if not found:
        return None
    shape, rest = _first_part(rest)
    opcode, _, rest = rest.lstrip().partition("(")
    operands, rest = _until_closed("(" + rest)
    opcode = opcode.strip()
    names = (operands.strip("()"),) if opcode == "constant" else tuple(re.findall(r"%([\w.\-]+)", operands))
    return Instruction(name.removeprefix("ROOT ").lstrip("%"), shape, opcode, names, rest)


def _first_part(text: str) -> tuple[str, str]:
    if text.startswith("("):
        return _until_closed(text)
    shape, _, rest = text.partition(" ")
    return shape, rest


def _until_closed(text: str) -> tuple[str, str]:
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def _braced(text: str, key: str) -> str:
    """What stands in braces after the key."""
    start = text.find(key)
    if start < 0:
        return ""
    depth = 0
    for i in range(start + len(key), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len(key) : i + 1]
    return ""


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtypes and dimensions in a shape, which may be a tuple."""
    found = []
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape)):
        if dtype in _BITS:
            found.append((dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)))
    return found


def size_of(dtype: str, dims: tuple[int, ...]) -> int:
    """In bytes, without padding."""
    return -(-math.prod(dims) * _BITS[dtype] // 8)


def _constant(name: str, instructions: dict[str, Instruction]) -> int | None:
    """The whole number that the instruction gives, if it is one."""
    found = instructions.get(name)
    while found is not None and found.opcode == "copy":
        found = instructions.get(found.operands[0])
    is_number = found is not None and found.opcode == "constant" and re.fullmatch(r"-?\d+", found.operands[0])
    return int(found.operands[0]) if found is not None and is_number else None


def _callees(key: str, attributes: str) -> list[str]:
    return re.findall(rf"\b(?:{key})=%([\w.\-]+)", attributes)


def _calls(instruction: Instruction) -> Iterator[str]:
    text = instruction.attributes
    if instruction.opcode == "while":
        yield from _callees("body|condition", text)
        return
    yield from _callees("calls|true_computation|false_computation|called_computation", text)
    branches = re.search(r"branch_computations=\{([^}]*)\}", text)
    if branches:
        yield from re.findall(r"%([\w.\-]+)", branches[1])
    if instruction.opcode in ("call", "call-start"):
        yield from _callees("to_apply", text)


# ---- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    instructions: list[Instruction]
    by_name: dict[str, Instruction]
    frames: _Frames

    def source(self, instruction: Instruction, part: int) -> str:
        """Where one part of a collective comes from."""
        takers = [
            i
            for i in self.instructions
            if i.opcode == "get-tuple-element"
            and instruction.name in i.operands
            and f"index={part}," in i.attributes + ","
        ]
        given = [self.by_name[o] for o in instruction.operands[part : part + 1] if o in self.by_name]
        users = [i for i in self.instructions if instruction.name in i.operands]
        for candidate in (*takers, instruction, *given, *users):
            found = _GRADIENT.search(_op_name(candidate))
            source = f"gradient of {found[1]}" if found else self.frames.line(candidate)
            if source:
                return source
        return ""


def _kind(instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _KINDS:
        return opcode
    if instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.attributes:
        transfer = re.search(r'_xla_megascale_transfer_type="([A-Z_]+)"', instruction.attributes)
        return transfer[1].lower().replace("_", "-") if transfer else "send"
    return None


def _collectives(
    kind: str,
    instruction: Instruction,
    context: _Context,
    times: int,
    num_devices: int,
    num_slices: int,
    platform: str,
) -> Iterator[Collective]:
    between_slices = instruction.opcode == "send"
    parts = arrays(instruction.shape)
    if between_slices:
        parts = parts[:1]
    elif instruction.opcode.endswith("-start") and kind != "all-reduce":
        parts = parts[len(parts) // 2 :] if len(parts) > 1 else parts  # operands, then results
    in_slice = num_devices // num_slices
    size, groups = (num_slices, "slices") if between_slices else _groups(instruction.attributes, in_slice)
    if size == 1:
        return
    network = "DCN" if between_slices else "ICI" if platform == "tpu" else ""
    together: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for i, (dtype, dims) in enumerate(parts):
        together.setdefault((dtype, context.source(instruction, i)), []).append(dims)
    for (dtype, source), shapes in together.items():
        amount = sum(size_of(dtype, dims) for dims in shapes) * (size if kind == "reduce-scatter" else 1)
        yield Collective(kind, dtype, amount, source, size, groups, network, times, tuple(shapes), instruction.name)


def _groups(attributes: str, num_devices: int) -> tuple[int, str]:
    listed = re.search(
        r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\S+ \{[^}]*\})", attributes
    )
    if listed is None:
        pairs = _braced(attributes, "source_target_pairs=")
        return (num_devices, pairs) if pairs else (num_devices, "all")
    text = listed[1]
    if text.startswith("{{"):
        return len(text[2:].partition("}")[0].split(",")), _short(text)
    if text.startswith("["):
        sizes = list(map(int, text[1:].partition("]")[0].split(",")))
        return math.prod(sizes[1:]), text
    if text.startswith("mesh"):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", text))
        used = re.findall(r"'([^']+)'", text.partition("{")[2])
        return math.prod(int(axes[a]) for a in used if a in axes), text
    return num_devices, "all"


def _short(groups: str) -> str:
    return groups if len(groups) <= 60 else groups[:57] + "..."


# ---- where lines come from -----------------------------------------------------------------------


def _op_name(instruction: Instruction) -> str:
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return _unescaped(found[1]) if found else ""


def _unescaped(text: str) -> str:
    """What XLA has written in quotes: bytes of UTF-8 in octal, backslashes before quotes."""
    return text.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace") if "\\" in text else text


class _Frames:
    """The table of call stacks in the program's text."""

    def __init__(self, text: str) -> None:
        files = {
            number: _unescaped(file)
            for number, file in re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M)
        }
        places = re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", _section(text, "FileLocations"), re.M
        )
        self._places = {number: (files.get(file, ""), line) for number, file, line in places}
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _section(text, "StackFrames"), re.M
        )
        self._frames = {int(n): (place, int(parent or 1) - 1) for n, place, parent in frames}

    def line(self, instruction: Instruction) -> str:
        """'file.py:12' of the innermost frame in a user's file."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if not found:
            given = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
            return f"{given[1]}:{given[2]}" if given else ""
        return self._line(int(found[1]))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (lives as long as the module)
    def _line(self, frame: int) -> str:
        lines, seen = [], set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            place, frame = self._frames[frame]
            lines.append(self._places.get(place, ("", "")))
        known = [(file, line) for file, line in lines if file]
        own = [(file, line) for file, line in known if "site-packages" not in file and not file.startswith("<frozen")]
        file, line = (own or known or [("", "")])[0]
        return f"{_jax.short_path(file)}:{line}".strip(":")


def _section(text: str, title: str) -> str:
    start = text.find(f"\n{title}\n")
    if start < 0:
        return ""
    return text[start + len(title) + 2 : text.find("\n\n", start + 1)]
