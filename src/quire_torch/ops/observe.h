// The core's calls as the operators make them. Each runs its problem; quire.explain and quire.debug.statistics hear of
// it when they listen, and while nobody does that costs the test of one flag.
#pragma once

#include <span>
#include <string>

#include "quire/runner/observer.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/problem.h"

namespace quire_torch {

/// A product of a Linear and the roles of its operands a and b (numerics.md 6.1).
struct Product {
  const char* name;
  const char* a;
  const char* b;
};
inline constexpr Product kFprop{"fprop", "x", "w"}, kDgrad{"dgrad", "dy", "w"}, kWgrad{"wgrad", "dy", "x"};

/// quire::quantize. role: "x", "w", "dy", ..., or "" where only the product that uses the codes will know it.
void run(const char* role, const quire::QuantizeProblem& problem);
void run(const char* role, std::span<const quire::QuantizeProblem> problems);
void run(const quire::DequantizeProblem& problem);
void run(const Product& product, const quire::GemmProblem& problem);
void run(const Product& product, std::span<const quire::GemmProblem> problems);
void run(const quire::ColumnSumProblem& problem);
/// Operands that a norm or an activation quantizes have no role yet.
void run(const quire::NormProblem& problem);
void run(const quire::NormGradProblem& problem);
void run(const quire::ActivationProblem& problem);
void run(std::span<const quire::ActivationProblem> problems);
void run(const quire::ActivationGradProblem& problem);

/// Who is told of the steps of a runner; null while nobody listens.
quire::RunnerObserver* runner_observer();

/// Starts an explanation of what this thread runs. Throws if it is being written already.
void begin_explanation();
/// Adds a step of somebody else: "OPERATION\tNAME\tPROBLEM".
void note_step(std::string step);
/// Ends it. A step is a line "step OPERATION\tNAME\tPROBLEM", followed by a line "operand
/// ROLE\tSPEC\tDIRECTION\tOUTER\t CONTRACTION\tADDRESS" for each quantized tensor that it writes or reads, and "kernel
/// NAME: VERDICT" for each row.
std::string end_explanation();

/// Turns counting on (from zero) or off, for the whole process.
void set_counting(bool on);
/// A line per operand since counting was turned on: "ROLE\tSPEC\tDIRECTION\tTENSORS\tELEMENTS\tSATURATED\tUNDERFLOWED\t
/// NONFINITE".
std::string counted();

}  // namespace quire_torch
