"""Runs TransformerEngine's own tests (a checkout of its repository) against quire and counts how each case ends.

    python tools/peer_tests.py --te PATH [--only FILE ...] [--cases 6] [--seed 1] [--part 1/40] [--seconds 2000]
        [--minutes 120] [--out FOLDER] [--write FILE ...]

One process of pytest at a time runs a file, with a plugin of this module and the stand-ins of peer_names.py. Results
lie in --out as one file of JSON lines per test file, with the whole text of each error; a file that is there is not run
again, and its failures are classified anew. A run that was stopped goes on after its last case. Limits are of the CPU's
time, so that other programs on the machine do not change results. The cases of a function are spread evenly over all
that it has; with --seed they are drawn at random, and run in random order, so that --minutes cuts every function alike.
--part I/N deals all cases of a file into N parts, at random but always in the same way, and runs the I-th. So N runs,
at any time, run every case once. The counts are those of all parts of N in --out, and a line says which these are.
--write stores a summary with the commit of the checkout: of FILE.json the counts for each function, of FILE.md a table
with a row for each test file.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

import peer_names

FILES = """
    test_sanity test_numerics test_recipe test_quantized_tensor test_permutation test_fused_router test_grouped_linear
    test_grouped_mlp test_grouped_tensor test_custom_recipe test_backward_override test_checkpoint test_deferred_init
    test_fusible_ops
""".split()
COLUMNS = ("passed", "skipped", "internals", "documented", "missing", "wrong", "unknown", "not run")
#: Of a child. TransformerEngine's tests of single parameters for all groups skip without the second.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
#: Bytes of memory that a process takes before it collects garbage, of which layers are a part.
COLLECTED = 2**28
#: Where names are documented.
PAGE = pathlib.Path(__file__).parents[1] / "docs/from-transformer-engine.md"

#: What a failure's last lines say -> its class. The first row that matches counts.
RULES = (
    (r"InternalName|transformer_engine_torch", "internals"),
    (r"has no attribute '_|'cpu' == 'cuda'", "internals"),
    # What its own autograd functions save.
    (r"'(CppFunction|\w+Backward)' object has no attribute", "internals"),
    (r"does not expose required (backward context|attributes)", "internals"),
    (r"Could not find checkpoint file", "internals"),  # files that TransformerEngine itself has to write first
    (r"on CUDA device|torch\.cuda|Torch not compiled with CUDA|No CUDA GPUs|Found no NVIDIA driver", "internals"),
    (r"dummy base class CUDA|\.is_cuda", "internals"),
    (r"no attribute '(fp8_meta_tensors_initialized|get_quantizer|fsdp_extract_buffers)'", "internals"),
    # What its layers note for a recomputation.
    (r"copy_forward_fp8_meta_tensors_for_recompute|global_fp8_buffer_pos", "internals"),
    (r"DocumentedName|(Attribute|ModuleNotFound)Error: .* is not available: ", "documented"),
    (r"no attribute 'quantizers'", "documented"),  # layers have none
    # Plain single parameters of a GroupedLinear are plain.
    (r"'Parameter' object has no attribute '(rowwise_data|(split_into_)?quantized_tensors)'", "documented"),
    (r"no attribute 'make_grouped_weights'", "documented"),
    # Another class of results, where it is asked for its class or written to; its values are not excused.
    (r"isinstance\(QuantizedActivation\(|QuantizedActivation: its decoded values are not in memory", "documented"),
    (r"No comparison pair was able to handle inputs of type <class '[\w.]*QuantizedActivation'>", "documented"),
    (r"MissingName|unexpected keyword argument|has no attribute|ImportError|ModuleNotFoundError", "missing"),
    (r"^assert |AssertionError|not close", "wrong"),  # pytest leaves the name out of some
    (r"^UnboundLocalError.*'msg'", "wrong"),  # what assert_allclose of test_numerics.py says within its own rounding
)

#: Tests, or how the name of a case begins, that fail because quire does otherwise on purpose -> words of the page that
#: say so. A star stands for one parameter.
DIFFERENCES = {
    "test_view_not_implemented": "the constructor has other arguments",
    "test_quantizer_update": "TransformerEngine warns if the type of the recipe changes",
    # The mean of a few random numbers, where TransformerEngine has zeros.
    "test_reset_parameters_doesnt_change_parameter_stats": "initialised as torch.nn.Linear by default",
    # It passes float32 numbers as scale bytes.
    "test_mxfp8_fsdp_extract_keeps_partial_columnwise_scale_block": "whose dtypes are checked",
    "test_fp8_scale_update_with_linear_module": "`fp8_meta` of a layer has read-only copies",
    "test_custom_recipe_factory_invocation_counts_and_cycling": "`qfactory` is called when the recipe is read",
    "test_custom_recipe_quantization_targets": "whatever layers the model has",
    "test_grouped_linear_module_type_dispatch": "whatever layers the model has",
    "test_meta_single_grouped_weight_with_delayed_wgrad": "has the single parameter from the start",
    "test_single_grouped_weight_rejects_host_m_splits": "`use_grouped_tensor` has no effect",
    "test_gpt_fp8_parameters[DelayedScaling": "with the scale of their own amax",
    # Plain values that are exact under the scale 1 are copied to such a weight.
    "test_dtype_cast[fp8_delayed_scaling-": "with the scale of their own amax",
    **dict.fromkeys(
        [
            "test_basic_linear_quantized[False-*-False-True-*-False-fp8_delayed_scaling",
            "test_linear[*-*-True-False-fp8_delayed_scaling-",
            "test_grouped_linear[*-*-True-False-fp8_delayed_scaling-",
            "test_grouped_linear[*-*-*-*-*-True-False-fp8_delayed_scaling-",
        ],
        "with the scale of their own amax",
    ),
    "test_layernorm_mlp_accuracy_delay_wgrad_compute": "gradients of biases can differ in the last bit",
    "test_linear_like_backward_override_matches_reference[mode_high_precision-torch.float32-bias-": (
        "gradients of biases in float32 can differ in the last bit from those without a recipe"
    ),
    # No state of delayed scaling.
    "test_linear[True-fp8_delayed_scaling]": "`state_dict` has no `_extra_state`",
    "test_quantize[True-False": "The gradient that `ops.Quantize` rounds is a plain tensor",
    "test_fused_op_cannot_omit_required_channel_output": "an `ops.FusedOperation` computes its operations one by one",
    "test_layer_norm_autocast": "PyTorch's autocast on CPUs has no float32",
    **dict.fromkeys(
        [
            f"test_pyt_autocast[{quantization}-autocast_dtype0-"
            for quantization in ("None", "fp8_delayed_scaling", "fp8_current_scaling", "mxfp8")
        ],
        "PyTorch's autocast on CPUs has no float32",
    ),
    # In bfloat16 only.
    **dict.fromkeys(
        [f"test_gpt_accuracy[{parallel}-small-{batch}-dtype2]" for parallel in (True, False) for batch in (1, 2)],
        "the gradients of `torch.nn.LayerNorm` differ from float64 by",
    ),
    # In float32 only.
    **dict.fromkeys(
        [
            f"test_layernorm_accuracy[*-{eps}-126m-{batch}-dtype0]"
            for eps in ("0.1", "0.001", "1e-05", "1e-07")
            for batch in (1, 2)
        ],
        "gradients of gains in float32 differ from float64 by",
    ),
    # Not in float32.
    **dict.fromkeys(
        [
            f"test_layernorm_mlp_accuracy[*-*-*-{name}-small-{batch}-{dtype}]"
            for name in ("relu", "reglu")
            for batch in (1, 2)
            for dtype in ("dtype1", "dtype2")
        ],
        "whether a ReLU's argument is above 0 can depend on the order of a sum",
    ),
    "test_grouped_linear_delay_wgrad_rejects_implicit_fallback": "`use_grouped_tensor` has no effect",
    "test_grouped_linear_fused_path_fp8_block_scaling_blackwell_error": "`use_grouped_tensor` has no effect",
}


@functools.cache
def on_page() -> frozenset[str]:
    """The names that docs/from-transformer-engine.md mentions."""
    text = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    return frozenset(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))


def classify(text: str, case: str = "") -> str:
    """The class of a failure of a case whose error is `text`; 'unknown' says that a person must look at it. A
    NotImplementedError is documented only if an option or function that it names, apart from the layer in front, is on
    the page."""
    name = case.rpartition("::")[2]
    for known in DIFFERENCES:
        pattern = re.escape(known).replace(r"\*", r"[^-\]]*")
        if re.match(pattern if "[" in known else rf"{pattern}(\[|$)", name):
            return "documented"
    found = re.search(r"NotImplementedError: (?:[\w.]+: )?(.*)", text, re.DOTALL)
    if found:
        named = re.findall(r"\b(\w+)=|\b(\w*_\w*)\b|\b([A-Z]\w*[a-z][A-Z]\w*)\b", found[1])
        return "documented" if on_page() & {name for names in named for name in names} else "unknown"
    return next((kind for pattern, kind in RULES if re.search(pattern, text)), "unknown")


def classified(record: dict[str, str]) -> dict[str, str]:
    """A record with the class that the rules give it now: they may be newer than the record."""
    return record | {"kind": classify(record["error"], record["case"])} if record["text"] else record


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Part:
    """The number-th of `parts` parts of a file's cases, counted from 1."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise argparse.ArgumentTypeError(f"takes I/N with I from 1 to N, such as 1/40, got {text}")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def of(self, items: list[pytest.Item]) -> list[pytest.Item]:
        dealt = random.Random(1).sample(items, len(items))
        return dealt[self.number - 1 :: self.parts]

    def results(self, stem: str) -> list[str]:
        """The names of the files with the results of each part."""
        return [f"{stem}.{number}-of-{self.parts}.jsonl" for number in range(1, self.parts + 1)]


class CaseTimeout(Exception):
    """A case ran for longer than --seconds."""


class Plugin:
    """Keeps `cases` cases of a function, and writes one line of JSON per case."""

    def __init__(self, options: argparse.Namespace):
        self.cases, self.seconds, self.out = options.cases, options.seconds, options.child
        self.part = options.part
        self.random = None if options.seed is None else random.Random(options.seed)
        self.minutes, self.end = options.minutes, float("inf")
        self.spent = 0.0  # of the CPU, by the last case
        self.kept = 0  # bytes of memory after the last collection of garbage

    def write(self, case: str, kind: str, error: str, text: str = "") -> None:
        record = {"case": case, "kind": kind, "error": error, "text": text, "seconds": round(self.spent, 3)}
        with self.out.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_runtestloop(self) -> None:
        self.end = time.process_time() + 60 * self.minutes
        peer_names.Absent.collecting = False
        gc.freeze()  # what is there now is not looked at again

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        self.spent = 0.0
        if time.process_time() < self.end:
            return None
        self.write(item.nodeid, "not run", "")
        return True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = self.drawn(items) if self.part is None else self.part.of(items)
        done = {json.loads(line)["case"] for line in self.out.read_text().splitlines()}
        items[:] = [item for item in kept if item.nodeid not in done]
        for module in {item.module for item in items}:
            peer_names.unskip(module)

    def drawn(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """At most `cases` of each function."""
        functions = collections.defaultdict(list)
        for item in items:
            functions[item.nodeid.partition("[")[0]].append(item)
        kept = []
        for group in functions.values():
            count = min(self.cases, len(group))
            if self.random is None:
                kept += [group[index * len(group) // count] for index in range(count)]
            else:
                kept += self.random.sample(group, count)
        if self.random is not None:
            self.random.shuffle(kept)
        return kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):  # noqa: ANN201 - a generator of pluggy
        def stop(signum: int, frame: object) -> None:
            raise CaseTimeout(f"over {self.seconds} s")

        # A case that only waits takes no time of the CPU.
        timers = {signal.ITIMER_PROF: (signal.SIGPROF, 1), signal.ITIMER_REAL: (signal.SIGALRM, 10)}
        for timer, (number, times) in timers.items():
            signal.signal(number, stop)
            signal.setitimer(timer, times * self.seconds)
        begun = time.process_time()
        try:
            return (yield)
        finally:
            self.spent = time.process_time() - begun
            for timer in timers:
                signal.setitimer(timer, 0)
            # pytest keeps the last failure there, and with it the layers of its frames.
            sys.last_type = sys.last_value = sys.last_traceback = None
            if resident() > self.kept + COLLECTED:  # takes longer than most cases
                gc.collect()
                self.kept = resident()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            error = report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else str(report.longrepr)
            self.write(report.nodeid, classify(error, report.nodeid), error, report.longreprtext)
        elif report.skipped:
            self.write(report.nodeid, "skipped", str(report.longrepr))
        elif report.when == "call":
            self.write(report.nodeid, "passed", "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            error = str(report.longrepr)
            last = error.strip().splitlines()[-1]
            self.write(f"{report.nodeid}::(import)", classify(last), last, error)


def counted(records: list[dict[str, str]], by_file: bool = False) -> dict[str, collections.Counter[str]]:
    """How often each class occurs in each function, or in each file, and in all."""
    counts = collections.defaultdict(collections.Counter)
    for record in records:
        file, _, name = record["case"].partition("[")[0].rpartition("::")
        file = pathlib.Path(file.partition("::")[0]).name
        counts[file if by_file else f"{file}::{name}"][record["kind"]] += 1
    counts["all"] = sum(list(counts.values()), collections.Counter())
    return counts


def table(counts: dict[str, collections.Counter[str]]) -> str:
    """A Markdown table: a row for each name, a column for each class."""
    lines = [" | ".join(("| test", *COLUMNS)) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [" | ".join((f"| {name}", *(str(row[kind]) for kind in COLUMNS))) + " |" for name, row in counts.items()]
    return "\n".join(lines)


def commit_of(checkout: pathlib.Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def said_of(ran: dict[str, list[int]], options: argparse.Namespace) -> str:
    """Which cases ran, as text. ran: the numbers of the parts of each file that ran."""
    if options.part is None:
        return f"at most {options.cases} cases of each function"
    files = [f"{name} {', '.join(map(str, numbers))}" for name, numbers in ran.items()]
    return f"of the {options.part.parts} parts of all cases these: {'; '.join(files)}"


def write(path: pathlib.Path, records: list[dict[str, str]], ran: str, options: argparse.Namespace) -> None:
    """A summary, as JSON or as Markdown."""
    commit = commit_of(options.te)
    if path.suffix == ".json":
        counts = {name: dict(row) for name, row in counted(records).items()}
        path.write_text(json.dumps({"commit": commit, "ran": ran, "counts": counts}, indent=1) + "\n")
        return
    head = f"Tests of TransformerEngine at commit {commit}, {ran}:"
    path.write_text(f"{head}\n\n{table(counted(records, by_file=True))}\n")


def run_file(path: pathlib.Path, options: argparse.Namespace) -> int:
    """What the child process does: all kept cases of one file."""
    peer_names.install()
    sys.path.insert(0, str(options.te / "tests/pytorch"))
    plugin = Plugin(options)
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", "--rootdir", str(options.te), "--tb=native", str(path)], [plugin]
    )


def run_child(name: str, result: pathlib.Path, options: argparse.Namespace) -> None:
    """A process that runs the kept cases of the file `name` and leaves them in `result`."""
    part = result.with_suffix(".part").resolve()
    part.touch()
    numbers = {name: getattr(options, name) for name in ("cases", "seed", "part", "seconds", "minutes")}
    given = {"te": options.te} | {name: value for name, value in numbers.items() if value is not None}
    same = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, __file__, *same, "--only", name, "--child", str(part)]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, env={**os.environ, **ENVIRONMENT}).returncode
    if code not in (0, 1, 2, 5):  # pytest's: passed, failed, files not importable, no cases
        raise SystemExit(f"peer_tests: the process for {name} ended with {code}; its results so far are {part}")
    part.rename(result)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--te", type=pathlib.Path, required=True, help="a checkout of TransformerEngine")
    parser.add_argument("--only", nargs="+", default=FILES, help="names of test files below tests/pytorch")
    parser.add_argument("--cases", type=int, default=6, help="cases per test function, at most")
    parser.add_argument("--seed", type=int, help="draws the cases at random")
    parser.add_argument("--part", type=Part.parse, help="I/N, instead of --cases and --seed: the I-th of N parts")
    parser.add_argument(
        "--seconds", type=float, default=2000, help="the CPU's time for a case; it may wait 10 times that"
    )
    parser.add_argument("--minutes", type=float, default=120, help="of the CPU, after which no case of a file starts")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/peer_tests"))
    parser.add_argument("--write", type=pathlib.Path, nargs="+", default=(), help="files that end in .json or .md")
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.te = options.te.resolve()
    if wrong := [str(path) for path in options.write if path.suffix not in (".json", ".md")]:
        parser.error(f"--write takes names that end in .json or .md, got {', '.join(wrong)}")
    return options


def main() -> int:
    options = parsed()
    if options.child:
        path = options.te / "tests/pytorch" / options.only[0]
        return run_file(path.with_suffix(".py"), options)
    options.out.mkdir(parents=True, exist_ok=True)
    records, ran = [], {}
    for name in options.only:
        stem = name.replace("/", ".").removesuffix(".py")
        names = [f"{stem}.jsonl"] if options.part is None else options.part.results(stem)
        result = options.out / names[0 if options.part is None else options.part.number - 1]
        if not result.exists():
            run_child(name, result, options)
        results = {number: options.out / name for number, name in enumerate(names, 1) if (options.out / name).exists()}
        ran[stem] = list(results)
        records += [classified(json.loads(line)) for path in results.values() for line in path.read_text().splitlines()]
    said = said_of(ran, options)
    print(f"{table(counted(records))}\n\nWhat ran: {said}")
    for path in options.write:
        write(path, records, said, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
