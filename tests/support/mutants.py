"""Mutants of a valid checkpoint: one or two damages drawn by hypothesis, and what an error has to name.

A directory is a dict from file name to bytes. A damage takes (draw, files) and returns the new files, what it
did, and culprits: an error has to contain every text of one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st

from safetensors_bytes import StoredTensor, header_length, parse, serialize, stored

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
Files: TypeAlias = dict[str, bytes]
Draw: TypeAlias = st.DrawFn


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A damaged directory, the damages in words, and the texts of which an error has to name one group."""

    files: Files = field(repr=False)
    done: str
    culprits: tuple[tuple[str, ...], ...] = field(repr=False)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints: not the bytes of all files."""
        printer.text(repr(self))

    def named_in(self, text: str) -> bool:
        return any(all(part in text for part in parts) for parts in self.culprits)


Damage: TypeAlias = Callable[[Draw, Files], Mutant]

WEIRD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 32, 48, 64, 128, 256, 10**30, 0.5, 4.0,
    float("nan"), float("inf"),
    "", "4", "group", "channel", "tensor", "gptq", "gptq_v2", "awq", "compressed-tensors", "marlin_moe",
    "weight", "dynamic", "static", "pack-quantized", "int-quantized", "float", "re:(", "re:a{99999999999}",
    "Linear", "\ud800",
    [], [1], ["re:["], ["re:.*experts.*"], ["re:.*down_proj$"], ["Linear"], {}, {"a": 1}, [[[]]], {"": {}},
)  # fmt: skip
EXPERT = re.compile(r"(?P<module>.+experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.(?P<field>\w+)")


def tensor_culprits(*names: str) -> tuple[tuple[str, ...], ...]:
    """A tensor is named by its full name, by module and rest, or (orders) by module, expert and matrix."""
    found: list[tuple[str, ...]] = []
    for name in names:
        found.append((name,))
        module, _, rest = name.partition(".experts.")
        if rest:
            found.append((f"{module}.experts", rest))
            if rest.count(".") < 2:  # fused: its parts may be named
                found.append((f"{module}.experts", re.split(r"[._](?:weight_)?\w+$", rest)[0]))
            if name.endswith("g_idx"):
                found += [
                    (f"{module}.experts.{rest.split('.')[0]}.{matrix}", "g_idx") for matrix in ("w13", "w2")
                ]
    return tuple(found)


def tensor_files(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def all_tensors(files: Files) -> Iterator[tuple[str, StoredTensor]]:
    for file in tensor_files(files):
        for tensor in parse(files[file]):
            yield file, tensor


def rewritten(files: Files, change: Callable[[str, StoredTensor], list[StoredTensor]]) -> Files:
    """Every tensor replaced by what `change(file, tensor)` makes of it; the index follows."""
    new, weight_map = dict(files), {}
    for file in tensor_files(files):
        tensors = [made for tensor in parse(files[file]) for made in change(file, tensor)]
        new[file] = serialize(tensors)
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), file)
    if INDEX in files:
        new[INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return new


def _with_index_kept(draw: Draw, old: Files, new: Files) -> Files:
    """The index may follow the tensors, or stay as it was."""
    return new if INDEX not in old or draw(st.booleans()) else new | {INDEX: old[INDEX]}


def _draw_tensor(draw: Draw, files: Files) -> tuple[str, StoredTensor]:
    every = list(all_tensors(files))
    experts = [item for item in every if ".experts." in item[1].name]
    return draw(st.sampled_from(experts if experts and draw(st.integers(0, 5)) else every))


# --- files


def cut_bytes(draw: Draw, files: Files) -> Mutant:
    name = draw(st.sampled_from(sorted(files)))
    raw = files[name]
    start = draw(st.integers(0, max(0, len(raw) - 1)))
    stop = draw(st.one_of(st.just(len(raw)), st.integers(start, min(len(raw), start + 64))))
    new = raw[:start] + raw[stop:]
    return Mutant(
        files=files | {name: new},
        done=f"{name}: bytes {start}:{stop} cut",
        culprits=((name,), *_named_around(raw, start), *_named_around(raw, stop), *_named_around(new, start)),
    )


def replace_file(draw: Draw, files: Files) -> Mutant:
    name = draw(st.sampled_from(sorted(files)))
    other = draw(st.sampled_from(sorted(files)))
    content = draw(
        st.sampled_from(
            [b"", b"{", b"{}", b"[]", b"null", b"version https://git-lfs\n", b"[" * 100_000,
             b'{"a":' * 100_000, b"\xff\xfe\x00", (1 << 62).to_bytes(8, "little"),
             (2).to_bytes(8, "little") + b"{}", files[other], files[name] + b"\0", files[name] + files[name]]
        )
    )  # fmt: skip
    culprits = ((name,), (other,)) if content == files[other] else ((name,),)
    return Mutant(
        files=files | {name: content}, done=f"{name}: replaced by {content[:20]!r}", culprits=culprits
    )


def remove_file(draw: Draw, files: Files) -> Mutant:
    name = draw(st.sampled_from(sorted(files)))
    rest = {key: raw for key, raw in files.items() if key != name}
    culprits = ((name,), ("expected routed experts",), ("A shard is missing",))
    return Mutant(files=rest, done=f"{name}: removed", culprits=culprits)


def swap_files(draw: Draw, files: Files) -> Mutant:
    one, two = draw(st.sampled_from(sorted(files))), draw(st.sampled_from(sorted(files)))
    return Mutant(
        files=files | {one: files[two], two: files[one]},
        done=f"{one} and {two} swapped",
        culprits=((one,), (two,)),
    )


def stray_file(draw: Draw, files: Files) -> Mutant:
    source = draw(st.sampled_from(tensor_files(files)))
    name = draw(
        st.sampled_from(
            ["model-00009-of-00009.safetensors", "model.safetensors", "other.safetensors", "a.txt"]
        )
    )
    return Mutant(
        files=files | {name: files[source]}, done=f"{source} copied to {name}", culprits=((name,), (source,))
    )


def flip(draw: Draw, files: Files) -> Mutant:
    """A bit anywhere: in a JSON file, a header, or a tensor's data."""
    name = draw(st.sampled_from(sorted(files)))
    raw = bytearray(files[name])
    length = (
        header_length(files[name]) if name.endswith(".safetensors") and draw(st.integers(0, 4)) else len(raw)
    )
    position, bit = draw(st.integers(0, min(length, len(raw)) - 1)), draw(st.integers(0, 7))
    raw[position] ^= 1 << bit
    culprits: list[tuple[str, ...]] = [(name,)]
    if name.endswith(".safetensors") and position >= header_length(files[name]):
        culprits += [parts for tensor in parse(files[name]) for parts in tensor_culprits(tensor.name)]
    else:  # what stood there, and what stands there now
        for content in (files[name], bytes(raw)):
            culprits += _named_around(content, position)
    return Mutant(
        files=files | {name: bytes(raw)},
        done=f"{name}: bit {bit} of byte {position}",
        culprits=tuple(culprits),
    )


def _named_around(raw: bytes, position: int) -> list[tuple[str, ...]]:
    """Names in the text around a byte: of tensors, files, keys and values."""
    text = raw[max(0, position - 200) : position + 200].decode("latin-1")
    found: list[tuple[str, ...]] = []
    for word in re.findall(r"[^\s\"{}\[\],:*^$]{3,}", text):
        found += tensor_culprits(word)
        if ".experts." in word:
            module, _, rest = word.partition(".experts.")
            found.append((f"{module}.experts", rest.split(".")[1] if "." in rest else rest))
    return found


# --- tensors


def rename(draw: Draw, files: Files) -> Mutant:
    file, chosen = _draw_tensor(draw, files)
    parts = chosen.name.split(".")
    i = draw(st.integers(0, len(parts) - 1))
    text = draw(
        st.sampled_from(["0", "1", "2", "7", "99999999999999999999", "-1", "01", "x", "weight", "bias",
                         "weight_scale", "gate_proj", "up_proj", "down_proj", "w1", "experts",
                         "weight_packed", "qweight", "g_idx", "é"])
    )  # fmt: skip
    how = draw(st.integers(0, 3))
    if how == 0:
        new = ".".join([*parts[:i], *parts[i + 1 :]]) or "x"
    elif how == 1:
        new = ".".join([*parts[:i], text, *parts[i:]])
    else:
        new = ".".join([*parts[:i], text, *parts[i + 1 :]])
    made = rewritten(files, lambda _, t: [replace(t, name=new) if t.name == chosen.name else t])
    return Mutant(
        files=_with_index_kept(draw, files, made),
        done=f"{chosen.name}: renamed to {new}",
        culprits=(
            (file,),
            *tensor_culprits(chosen.name, new),
            (".".join(new.split(".")[:-3]), new.split(".")[-2:][0]),
        ),
    )


def drop(draw: Draw, files: Files) -> Mutant:
    """One tensor, or all of an expert, of a projection, or of one field."""
    _, chosen = _draw_tensor(draw, files)
    match = EXPERT.fullmatch(chosen.name)
    kind = draw(st.sampled_from(["tensor", "expert", "projection", "field"])) if match else "tensor"

    def hit(name: str) -> bool:
        if match is None or kind == "tensor":
            return name == chosen.name
        other = EXPERT.fullmatch(name)
        return other is not None and other["module"] == match["module"] and other[kind] == match[kind]

    gone = [tensor.name for _, tensor in all_tensors(files) if hit(tensor.name)]
    made = rewritten(files, lambda _, t: [] if hit(t.name) else [t])
    culprits = tensor_culprits(*gone)
    if match and kind != "tensor":
        culprits += (
            (match["module"], match[kind]),
            (match["module"], "experts"),
            ("expected routed experts",),
        )
    return Mutant(
        files=_with_index_kept(draw, files, made),
        done=f"dropped {kind}: {', '.join(gone[:3])} …",
        culprits=culprits,
    )


def reshape(draw: Draw, files: Files) -> Mutant:
    _, chosen = _draw_tensor(draw, files)
    tensor = chosen.tensor()
    shapes = [tensor[None], tensor[..., None], tensor.reshape(-1), tensor[:0], tensor.reshape(1, -1)]
    if tensor.dim() > 1:
        shapes += [tensor.t() if tensor.dim() == 2 else tensor.transpose(1, 2), tensor[:-1], tensor[..., :-1]]
        shapes += [
            torch.cat([tensor, tensor[:1]]),
            torch.cat([tensor, tensor]),
            torch.cat([tensor, tensor], -1),
        ]
        shapes += [tensor[: len(tensor) // 2], tensor[..., : max(1, tensor.shape[-1] // 2)]]
    new = stored(chosen.name, draw(st.sampled_from(shapes)))
    made = rewritten(files, lambda _, t: [new if t.name == chosen.name else t])
    return Mutant(
        files=made,
        done=f"{chosen.name}: {chosen.shape} made {new.shape}",
        culprits=tensor_culprits(chosen.name),
    )


def retype(draw: Draw, files: Files) -> Mutant:
    """Another dtype in the header, of equal size, or converted values."""
    _, chosen = _draw_tensor(draw, files)
    same_size = {
        "BF16": ["F16", "I16", "U16"],
        "F16": ["BF16", "I16"],
        "F32": ["I32", "U32"],
        "I32": ["F32", "U32"],
    }
    if draw(st.booleans()):
        new = replace(chosen, dtype=draw(st.sampled_from([*same_size.get(chosen.dtype, ["F64"]), "F8_E8M0"])))
    else:
        dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.int32]))
        new = stored(chosen.name, chosen.tensor().to(dtype))
    files_of = [(file, t.name) for file, t in all_tensors(files) if t.name == chosen.name]
    made = rewritten(files, lambda _, t: [new if t.name == chosen.name else t])
    field = chosen.name.rpartition(".")[
        2
    ]  # one dtype of a field: which of two is the wrong one, nobody knows
    return Mutant(
        files=made,
        done=f"{chosen.name}: {chosen.dtype} made {new.dtype}",
        culprits=(
            *tensor_culprits(chosen.name),
            (files_of[0][0],),
            (chosen.name.split(".experts")[0], field),
        ),
    )


def revalue(draw: Draw, files: Files) -> Mutant:
    """Values that no layer can have, or that no other tensor agrees with."""
    every = [
        item
        for item in all_tensors(files)
        if re.search(r"(scales?|g_idx|shape|bias|zeros|point)$", item[1].name)
    ]
    _, chosen = draw(st.sampled_from(every or list(all_tensors(files))))
    tensor = chosen.tensor()
    value = draw(st.sampled_from([0, -1, 1, 2, 7, 1 << 20]))
    if tensor.is_floating_point():
        value = draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -1.0]))
    flat = tensor.view(-1)
    some = draw(st.sampled_from([slice(0, 1), slice(-1, None), slice(None), slice(0, None, 2)]))
    flat[some] = value
    if chosen.name.endswith("g_idx") and draw(st.booleans()):
        flat.copy_(chosen.tensor().view(-1).flip(0))
    new = stored(chosen.name, tensor)
    made = rewritten(files, lambda _, t: [new if t.name == chosen.name else t])
    return Mutant(files=made, done=f"{chosen.name}[{some}] = {value}", culprits=tensor_culprits(chosen.name))


def duplicate(draw: Draw, files: Files) -> Mutant:
    """A second copy under its own name, in the same file or another one, or under another name."""
    file, chosen = _draw_tensor(draw, files)
    target = draw(st.sampled_from(tensor_files(files)))
    name = draw(
        st.sampled_from(
            [chosen.name, f"{chosen.name}_2", f"x.{chosen.name}", chosen.name.replace(".0.", ".9.")]
        )
    )
    copy, raw = replace(chosen, name=name), files[target]
    new = files | {target: serialize([*parse(raw), copy])}
    if INDEX in files and draw(st.booleans()):
        index = json.loads(files[INDEX])
        index["weight_map"][name] = target
        new[INDEX] = json.dumps(index).encode()
    return Mutant(
        files=new,
        done=f"{chosen.name} of {file}: copied to {name} of {target}",
        culprits=(*tensor_culprits(chosen.name, name), (target,), ("x",)),
    )


def renumber(draw: Draw, files: Files) -> Mutant:
    """An expert gets another number; where that is taken, the two are exchanged or collide."""
    experts = sorted(
        {(m["module"], m["expert"]) for _, t in all_tensors(files) if (m := EXPERT.fullmatch(t.name))}
    )
    if not experts:
        return rename(draw, files)
    module, number = draw(st.sampled_from(experts))
    other = draw(st.sampled_from(["0", "1", "2", "5", "00", "10000000000000"]))
    exchange = draw(st.booleans())

    def change(_: str, tensor: StoredTensor) -> list[StoredTensor]:
        for old, new in ((number, other), (other, number)):
            prefix = f"{module}.{old}."
            if tensor.name.startswith(prefix) and (old == number or exchange):
                return [replace(tensor, name=f"{module}.{new}.{tensor.name.removeprefix(prefix)}")]
        return [tensor]

    return Mutant(
        files=rewritten(files, change),
        done=f"{module}: expert {number} is now {other}{', exchanged' if exchange else ''}",
        culprits=((module,), *((file,) for file in tensor_files(files))),
    )


def respell(draw: Draw, files: Files) -> Mutant:
    """A projection, or a field, of another name in all experts of a module."""
    _, chosen = _draw_tensor(draw, files)
    match = EXPERT.fullmatch(chosen.name)
    if match is None:
        return rename(draw, files)
    kind = draw(st.sampled_from(["projection", "field"]))
    new = draw(
        st.sampled_from(
            ["x", "w1", "w2", "up_proj", "down_proj", "weight", "weight_packed", "weight_scale", "scales"]
        )
    )

    def change(_: str, tensor: StoredTensor) -> list[StoredTensor]:
        other = EXPERT.fullmatch(tensor.name)
        if other is None or other["module"] != match["module"] or other[kind] != match[kind]:
            return [tensor]
        begin, end = other.span(kind)
        return [replace(tensor, name=tensor.name[:begin] + new + tensor.name[end:])]

    return Mutant(
        files=rewritten(files, change),
        done=f"{match['module']}: {kind} {match[kind]} is now {new}",
        culprits=(
            (match["module"], match[kind]),
            (match["module"], new),
            *((file,) for file in tensor_files(files)),
        ),
    )


# --- JSON


def edit_index(draw: Draw, files: Files) -> Mutant:
    if INDEX not in files:
        return edit_config(draw, files)
    index = json.loads(files[INDEX])
    weight_map = index["weight_map"]
    name = draw(st.sampled_from(sorted(weight_map)))
    target = draw(
        st.sampled_from([*tensor_files(files), "none.safetensors", "../x.safetensors", "/etc/passwd", "", ".",
                         "a\0b", "x" * 300, CONFIG, INDEX, None, 5, []])
    )  # fmt: skip
    how = draw(st.sampled_from(["point", "remove", "add", "map"]))
    culprits: tuple[tuple[str, ...], ...] = (
        *tensor_culprits(name),
        (INDEX,),
        (str(target) or "''",),
        (repr(target),),
    )
    if how == "point":
        weight_map[name] = target
    elif how == "remove":
        del weight_map[name]
    elif how == "add":
        weight_map["lm_head.extra"] = target
        culprits += (("lm_head.extra",),)
    else:
        index["weight_map"] = draw(st.sampled_from([None, [], {}, "x", 5]))
        culprits = (("weight_map",),)
    return Mutant(
        files=files | {INDEX: json.dumps(index).encode()},
        done=f"index: {how} {name} {target!r}",
        culprits=culprits,
    )


def config_places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every key and list entry that bears on how experts are read."""
    found = [] if not path else [path]
    items = (
        config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    )
    for key, value in items:
        found += config_places(value, (*path, key))
    return found


RELEVANT = {"quantization_config", "text_config", "num_experts", "num_local_experts", "num_experts_per_tok"}


def edit_config(draw: Draw, files: Files) -> Mutant:
    """A setting gets another value, goes missing, or appears under another key."""
    config = json.loads(files[CONFIG])
    places = [path for path in config_places(config) if RELEVANT & set(path)]
    path = draw(st.sampled_from(places))
    holder = config
    for key in path[:-1]:
        holder = holder[key]
    how = draw(st.sampled_from(["set", "set", "set", "remove", "rekey"]))
    value = draw(st.sampled_from(WEIRD))
    if how == "set":
        holder[path[-1]] = value
    else:
        old = holder.pop(path[-1])
        if how == "rekey" and isinstance(holder, dict):
            holder[f"{path[-1]}_2"] = old
    where = ".".join(map(str, path))
    names = [str(key) for key in path if isinstance(key, str)]
    return Mutant(
        files=files | {CONFIG: json.dumps(config).encode()},
        done=f"{CONFIG}: {how} {where} {value!r}",
        culprits=((names[-1],), (".".join(names[-2:]),), ("quantization_config",)),
    )


DAMAGES: tuple[Damage, ...] = (
    cut_bytes, replace_file, remove_file, swap_files, stray_file, flip, flip, rename, drop, reshape, retype,
    revalue, duplicate, renumber, respell, edit_index, edit_config, edit_config, edit_config,
)  # fmt: skip


def combined(files: Files, damages: tuple[Damage, ...]) -> st.SearchStrategy[Mutant]:
    """`files` with one of the damages, sometimes two."""

    @st.composite
    def mutant(draw: Draw) -> Mutant:  # files and damages stay out of the strategy's repr, which is printed
        first = draw(st.sampled_from(damages))(draw, dict(files))
        if draw(st.integers(0, 5)):
            return first
        try:
            second = draw(st.sampled_from(damages))(draw, first.files)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError, AttributeError):
            return first  # the first left nothing that the second can be done to
        return Mutant(
            files=second.files, done=f"{first.done}; {second.done}", culprits=first.culprits + second.culprits
        )

    return mutant()


def mutants(files: Files) -> st.SearchStrategy[Mutant]:
    """Mutants of a source checkpoint."""
    return combined(files, DAMAGES)
