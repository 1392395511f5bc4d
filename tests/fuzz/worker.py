"""The process that makes the calls: says each one before it makes it, so that whoever reads knows which was the last.

    python -m fuzz.worker JOURNAL SECONDS SEED FIRST ONLY

JOURNAL: a file that holds the call that runs, and at the end "done". Failures are lines of standard output.
"""

import ctypes
import os
import random
import resource
import sys
import time
import warnings

import torch
from torch.utils._pytree import tree_map_only

from fuzz import calls, mutate, planted
from fuzz.mutate import tensors_of

POISON = -6  # mallopt's M_PERTURB: bytes that malloc fills memory with
MEMORY = 3 << 30


class Journal:
    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)

    def say(self, words: str) -> None:
        data = words.encode(errors="replace")[:20000]
        os.pwrite(self.file, data, 0)
        os.ftruncate(self.file, len(data))


def poison(byte: int) -> None:
    ctypes.CDLL(None).mallopt(POISON, byte)


def check_poison() -> None:
    """Whether what nobody writes would be seen."""
    poison(0x11)
    assert torch.empty(24, dtype=torch.uint8).tolist() == 24 * [0xEE], "malloc does not fill memory; is this glibc?"
    poison(0)


def copied(value: object, made: dict[int, torch.Tensor]) -> object:
    """The same arguments with memory of their own, and as much shared among them as before."""
    if isinstance(value, list):
        return [copied(one, made) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in made:
        made[id(value)] = copy_of(value)
    return made[id(value)]


def copy_of(t: torch.Tensor) -> torch.Tensor:
    if t.is_meta or not mutate.is_plain(t):
        return t
    with torch.no_grad():
        storage, size = t.untyped_storage().clone(), t.untyped_storage().nbytes()
        new = t.new_empty(0).set_(storage, t.storage_offset(), t.shape, t.stride()).requires_grad_(t.requires_grad)
        new.untyped_storage().resize_(size)  # set_ has made it as large as the sizes ask for
        return new


def bytes_of(value: object) -> list[bytes | None]:
    """All bytes that tensors can reach."""
    return [memory(t) for t in tensors_of(value)]


def memory(t: torch.Tensor) -> bytes | None:
    if t.is_meta or t.layout != torch.strided or t.is_nested or t._is_zerotensor():
        return None
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes()


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        kind = "" if value.layout == torch.strided else f", {value.layout}"
        kind += ", freed" if mutate.is_freed(value) else ""
        kind += ", nested" if value.is_nested else ", zeros without memory" if value._is_zerotensor() else ""
        small = not value.is_meta and not kind and value.dtype in (torch.int32, torch.int64) and 0 < value.numel() < 9
        kind += f", {value.tolist()}" if small else ""
        sizes = "nested" if value.is_nested else list(value.shape)
        strides = f" by {value.stride()}" if value.layout == torch.strided and not value.is_contiguous() else ""
        return f"<{str(value.dtype)[6:]} {sizes}{strides}{kind}, {value.device}{', grad' * value.requires_grad}>"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    return repr(value)[:300]


def described(operator: torch._ops.OpOverload, arguments: list[object]) -> str:
    names = [a.name for a in operator._schema.arguments]
    return f"{operator}({', '.join(f'{n}={describe(a)}' for n, a in zip(names, arguments, strict=True))})"


class Fuzzer:
    def __init__(self, seed: int, only: str, store: str) -> None:
        self.seed = seed
        self.known = planted.plant() if only.startswith("planted") else calls.recorded_once(seed, store)
        self.operators = [operator for operator in calls.operators() if only in str(operator)]
        self.others: dict[tuple[str, str], list[object]] = {}
        for kept in self.known.values():
            for call in kept:
                for one, value in zip(call.operator._schema.arguments, call.arguments, strict=True):
                    self.others.setdefault((str(one.type), one.name), []).append(value)

    def make(self, number: int) -> tuple[torch._ops.OpOverload, list[object]]:
        """The call of that number."""
        source = random.Random(f"{self.seed} {number}")
        torch.manual_seed(number)
        operator = source.choice(self.operators)
        declared, kept = operator._schema.arguments, self.known.get(str(operator), [])
        if kept:
            arguments = list(source.choice(kept).arguments)
        else:
            arguments = [self.any_value(one, source) for one in declared]
        numbers = [i for i, one in enumerate(declared) if calls_kind(one) in ("int", "SymInt", "SymInt[]")]
        is_hollow = source.random() < (0.3 if numbers else 0.1)
        if is_hollow:
            arguments = mutate.hollow(arguments, source)
        for _ in range(source.choice((0, 1, 1, 1, 2, 3)) if declared else 0):
            if is_hollow and numbers and source.random() < 0.7:  # huge ones beside what has no elements
                at = source.choice(numbers)
                arguments[at] = mutate.huge_number(arguments[at], source)
                continue
            at = source.randrange(len(declared))
            one = declared[at]
            kind = calls_kind(one)
            arguments[at] = mutate.argument(kind, arguments[at], self.others.get((str(one.type), one.name), []), source)
        if source.random() < 0.1 and declared:  # one tensor in two places
            every = tensors_of(arguments)
            places = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
            if places:
                arguments[source.choice(places)] = source.choice(every)
        if source.random() < 0.05:  # as tracing calls it
            dense = tree_map_only(torch.Tensor, lambda t: t.to("meta") if mutate.is_plain(t) else t, arguments)
            return operator, without_negated_views(operator, dense)
        return operator, without_negated_views(operator, arguments)

    def any_value(self, declared: torch._C.Argument, source: random.Random) -> object:
        found = self.others.get((str(declared.type), declared.name))
        if found:
            return source.choice(found)
        start = {"int": 1, "SymInt": 1, "str": "", "bool": False, "float": 1.0, "ScalarType": torch.float32}
        kind = calls_kind(declared)
        return start[kind] if kind in start else mutate.PLAIN[0] if kind == "Tensor" else None if "?" in kind else []


def without_negated_views(operator: torch._ops.OpOverload, arguments: list[object]) -> list[object]:
    """PyTorch writes what an operator has written to a negated view back to it from the operator's result, and reads
    what is no more on its stack where there is none (MathBitsFallback.h of 2.13)."""
    if operator._schema.returns:
        return arguments
    return tree_map_only(torch.Tensor, lambda t: torch._neg_view(t) if t.is_neg() else t, arguments)


def calls_kind(declared: torch._C.Argument) -> str:
    """The type of an argument as schemas write it, without alias marks."""
    kind = str(declared.real_type)
    words = {"List[Tensor]": "Tensor[]", "List[Optional[Tensor]]": "Tensor?[]", "Optional[Tensor]": "Tensor?"}
    return words.get(kind, "SymInt[]" if kind.startswith("List") else kind)


def outcome(operator: torch._ops.OpOverload, arguments: list[object], fail, byte: int) -> list[object] | str:
    """The bytes of results, of gradients and of what was written; or the words of the refusal."""
    before = bytes_of(arguments)
    poison(byte)
    try:
        results = operator(*arguments)
    except Exception as error:
        poison(0)
        if bytes_of(arguments) != before:
            fail(f"a refused call has written: {error}")
        check_words(error, fail)
        return str(error)
    finally:
        poison(0)
    if operator._schema.name.startswith("quire::runner_register"):
        torch.ops.quire.runner_unregister(results)
    results = [] if results is None else results
    given = results if isinstance(results, list | tuple) else [results]
    if not_to_be_written(operator, arguments, before):
        fail("an argument has changed that is not declared as written")
    return [bytes_of(plain_copies(given)), bytes_of(arguments), gradients(given, arguments, fail, byte)]


def plain_copies(results: object) -> list[torch.Tensor]:
    """Without what lies between their elements."""
    return [t.detach().contiguous().clone() for t in tensors_of(list(results)) if t.layout == torch.strided]


def gradients(results: object, arguments: list[object], fail, byte: int) -> object:
    wanted = [t for t in tensors_of(list(results)) if t.requires_grad]
    if not wanted:
        return None
    before = bytes_of(arguments)
    poison(byte)
    try:
        leaves = [t for t in tensors_of(arguments) if t.requires_grad and t.is_leaf]
        grads = torch.autograd.grad(wanted, leaves, [torch.ones_like(t) for t in wanted], allow_unused=True)
        return bytes_of(plain_copies([g for g in grads if g is not None]))
    except Exception as error:
        poison(0)
        if bytes_of(arguments) != before:
            fail(f"a refused backward pass has written: {error}")
        check_words(error, fail)
        return str(error)
    finally:
        poison(0)


def not_to_be_written(operator: torch._ops.OpOverload, arguments: list[object], before: list[bytes | None]) -> bool:
    after, at, written, changed = bytes_of(arguments), 0, set(), []
    for declared, value in zip(operator._schema.arguments, arguments, strict=True):
        for t in tensors_of(value):
            key = t.untyped_storage().data_ptr() if before[at] is not None else None
            if declared.alias_info is not None and declared.alias_info.is_write:
                written.add(key)
            elif before[at] != after[at]:
                changed.append(key)
            at += 1
    return any(key not in written for key in changed)


STRAY = ("INTERNAL ASSERT", "vector::", "basic_string", "please report a bug", "std::exception", "Unknown exception")


#: What Python raises by itself, without a sentence.
BARE = (LookupError, AttributeError, AssertionError, ArithmeticError, UnboundLocalError)


def check_words(error: Exception, fail) -> None:
    words = str(error)
    if isinstance(error, BARE) and len(words.split()) < 5:
        fail(f"no sentence but {type(error).__name__}: {words}")
    for stray in STRAY:
        if stray in words:
            fail(f"stray words: {words[:300]}")


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def main() -> None:
    path, seconds, seed, first, only = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    journal = Journal(path)
    journal.say("0\tstart")
    fuzzer, number, seen = Fuzzer(seed, only, f"{path}.calls"), first, set()
    if "QUIRE_FUZZ_SANITIZED" not in os.environ:  # a sanitizer has memory and an allocator of its own
        limit_memory()
        check_poison()
    end = time.monotonic() + seconds
    while time.monotonic() < end or (seconds == 0 and number == first):
        operator, arguments = fuzzer.make(number)
        words = described(operator, arguments)
        journal.say(f"{number}\t{words}")

        def fail(what: str, number: int = number, words: str = words, operator=operator) -> None:
            if (str(operator), what[:40]) not in seen:  # the first of its kind
                seen.add((str(operator), what[:40]))
                print(f"{number}\t{what}\t{words}", flush=True)

        pair = [outcome(operator, copied(arguments, {}), fail, byte) for byte in (0x11, 0xEE)]
        if (
            not isinstance(pair[0], str)
            and pair[0] != pair[1]
            and operator.overloadpacket is not torch.ops.quire.wgrad_take_
        ):  # takes one a call
            fail("two equal calls differ: a result is not written, or not by its arguments alone")
        number += 1
    journal.say(f"{number}\tdone")


if __name__ == "__main__":
    main()
