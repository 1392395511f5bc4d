// Who listens to what operators run: quire.explain, quire.debug.statistics and quire.debug.operands (records.h), by the
// core's one stream of events.
// While nobody listens, that costs the test of one flag a call.
#pragma once

#include <atomic>
#include <string>

#include "quire/device/observer.h"

namespace quire_torch {

/// Explanations being written, one for counting, and one for records.
inline std::atomic<int> observers{0};
quire::Observer* listener();

/// Who is told of the problems of a call that begins now; null while nobody listens.
inline quire::Observer* observer() { return observers.load(std::memory_order_relaxed) == 0 ? nullptr : listener(); }

/// Starts an explanation of what this thread runs. Throws if it is being written already.
void begin_explanation();
/// Adds a step of somebody else: "OPERATION\tNAME\tPROBLEM".
void note_step(std::string step);
/// Ends it. A step is a line "step OPERATION\tNAME\tPROBLEM", followed by a line "operand
/// ROLE\tSPEC\tDIRECTION\tOUTER\t CONTRACTION\tADDRESS" for each quantized tensor that it writes or reads, and "kernel
/// NAME: VERDICT" for each row.
std::string end_explanation();

/// Turns counting on (from zero) or off, for the whole process. Counts what kernels quantize, of
/// groups only what the host's do; not what is captured.
void set_counting(bool on);
/// From now on this thread computes for the layer of that name, until counting ends.
void counting_for(std::string layer);
/// A line per layer and operand since counting was turned on:
/// "LAYER\tROLE\tSPEC\tDIRECTION\tTENSORS\tELEMENTS\tSATURATED\tUNDERFLOWED\tNONFINITE\tAMAX\tERROR". AMAX: the largest
/// finite magnitude. ERROR: of finite values, the root of the sum of squared errors, relative to that of the squares;
/// "nan" if there are elements, and none of them can be measured.
std::string counted();

/// Turns copies of operands (records.h) on or off, for the whole process.
void set_observing_operands(bool on);

}  // namespace quire_torch
