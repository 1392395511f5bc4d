"""Finds the functions of a C++ file by matching brackets: good enough for formatted code, not a parser."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# What must not be searched for brackets.
TOKENS = re.compile(
    r"""
    (?P<number> \d[\w.]* (?:'\w+)+ )                            # kept, and first: 1'000 opens no character
    | //[^\n]* | /\*.*?\*/                                      # comments
    | R"(?P<mark>[^\s()]*)\(.*?\)(?P=mark)"                      # raw strings
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'                 # strings and characters
    | ^[ \t]*\#(?:\\\n|[^\n])*                                  # preprocessor lines
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
# What may follow the parameters of a function.
TAIL = re.compile(
    r"\s*(?:\b(?:const|noexcept|override|final|mutable|try)\b\s*|&&?\s*|\(\)|->.*|requires\b.*)*", re.DOTALL
)
CONSTRUCTOR = re.compile(r"\)\s*(?:noexcept\s*)?:(?!:)")
TEMPLATE = re.compile(r"\btemplate\s*<(?:[^<>]|<[^<>]*>)*>")
ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)")
# Up to the bracket that opens its parameters; an index follows a name or a bracket, an attribute has two brackets.
LAMBDA = re.compile(r"(?<![\w\])\[])\s?\[(?!\[)[^\[\]]*\]\s*(?:<[^<>]*>\s*)?\(")
LAMBDA_BODY = re.compile(r"\s*(?:\b(?:mutable|noexcept|constexpr|requires)\b|->|\{)")
NOT_A_NAME = {"noexcept", "requires", "decltype", "alignas", "__attribute__", "static_assert", "explicit"}


@dataclass
class Function:
    name: str
    line: int
    lines: int
    parameters: int


def scan(text: str) -> Iterator[Function]:
    """The functions, lambdas included, defined or declared at namespace and class scope; not those inside functions."""
    code = without_texts(text)
    start = position = 0
    while bracket := re.compile("[(){};]").search(code, position):
        at, position = bracket.start(), bracket.end()
        head = code[start:at]
        if bracket[0] == "(":
            position = closing(code, at) + 1
        elif bracket[0] == "{" and CONSTRUCTOR.search(head) and re.search(r"[\w>]\s*$", head):
            position = closing(code, at) + 1  # a member of an initialiser list
        elif bracket[0] == "{" and head.rstrip().endswith("]"):
            start = position = closing(code, at) + 1  # a lambda without parameters
        elif bracket[0] == "{" and (found := signature(head)):
            end = closing(code, at)
            yield function(code, start, end, found)
            start = position = end + 1
        elif bracket[0] == ";" and (found := signature(re.sub(r"=\s*(0|default|delete)\s*$", "", head))):
            yield function(code, start, at, found)
            start = position
        elif bracket[0] in "{};":
            start = position


def lambdas(text: str) -> Iterator[Function]:
    """The lambdas with parameters, wherever they are. Their lines are counted with the function around them."""
    code = without_texts(text)
    for match in LAMBDA.finditer(code):
        opening = match.end() - 1
        end = closing(code, opening)
        if LAMBDA_BODY.match(code, end + 1):
            yield Function("lambda", code.count("\n", 0, match.end()) + 1, 0, parameters(code[opening + 1 : end]))


def without_texts(text: str) -> str:
    """Comments, strings and preprocessor lines are blanks, so that no bracket in them counts."""
    return TOKENS.sub(lambda match: match["number"] or re.sub(r"[^\n]", " ", match[0]), text)


def closing(code: str, at: int) -> int:
    """The place of the bracket that closes the one at `at`."""
    depth = 0
    for bracket in re.compile("[(){}]").finditer(code, at):
        depth += 1 if bracket[0] in "({" else -1
        if depth == 0:
            return bracket.start()
    return len(code)


def signature(head: str) -> tuple[str, str] | None:
    """The name and the parameters of the function that `head` declares, or nothing if it declares none."""
    head = TEMPLATE.sub("", head)
    if constructor := CONSTRUCTOR.search(head):
        head = head[: constructor.start() + 1]
    position = 0
    while opening := re.compile(r"(operator\s*(?:\(\)|[^\s\w(]+)|[\w\]]+)?\s*\(").search(head, position):
        end = closing(head, opening.end() - 1)
        name = opening[1] or ""
        initialiser = ASSIGNMENT.search(head[: opening.start()]) and name != "]"
        if name not in NOT_A_NAME and not initialiser and TAIL.fullmatch(head[end + 1 :]):
            return name.replace("]", "lambda"), head[opening.end() : end]
        position = end + 1
    return None


def function(code: str, start: int, end: int, found: tuple[str, str]) -> Function:
    start += len(code[start:end]) - len(code[start:end].lstrip())
    line = code.count("\n", 0, start) + 1
    count = 0 if found[0] == "lambda" else parameters(found[1])  # those of lambdas: by lambdas()
    return Function(found[0], line, code.count("\n", start, end) + 1, count)


def parameters(text: str) -> int:
    depth = commas = 0
    for token in re.findall(r"->|<=|>=|[(\[{<>}\]),]", text):
        if token in ("(", "[", "{", "<"):
            depth += 1
        elif token in (")", "]", "}", ">"):
            depth -= 1
        elif token == "," and depth == 0:
            commas += 1
    return commas + 1 if text.strip() not in ("", "void") else 0
