// The four questions that a build of the halo kernel answers, each by one constant of its Config. The planner
// has the same names and numbers (build.py).
#pragma once

namespace tconv3d {

// Config::kInput: how input arrives in the stages of a block.
struct Input {
  static constexpr int kLoaded = 0;     // Loaders load it to registers, round it and store it to the stages.
  static constexpr int kCopied = 1;     // Asynchronous copies bring rows of channels; loaders round float32.
  static constexpr int kRewritten = 2;  // Asynchronous copies bring rows that a previous launch has rounded.
  static constexpr int kInRegisters = 3;  // Asynchronous copies bring rows; consumers round float32.
  static constexpr int kLines = 4;        // Asynchronous copies bring lines as they lie in memory.
  static constexpr int kTurned = 5;  // Asynchronous copies bring pieces of lines, which loaders transpose.
};

// Config::kOutput: how sums leave the registers of consumers.
struct Output {
  static constexpr int kDirect = 0;    // They are stored by lanes, or through a small scratch.
  static constexpr int kImages = 1;    // They pass through images of output rows (halo_images.cuh).
  static constexpr int kLongRuns = 2;  // They pass through images of long runs of rows (halo_long_runs.cuh).
};

// Config::kDivision: who divides K, the sum over input channels and taps.
struct Division {
  static constexpr int kNobody = 0;
  static constexpr int kBlocks = 1;     // Blocks divide the chunks of every tile and store portions.
  static constexpr int kLastTiles = 2;  // Blocks divide the chunks of the last tiles (halo_pieces.cuh).
  static constexpr int kConsumers = 3;  // Two consumers of a block alternate at panels (halo_divided.cuh).
};

// Config::kWeights: where the packed weights of a column tile live.
struct Weights {
  static constexpr int kResident = 0;     // All panels stay in shared memory.
  static constexpr int kStreamed = 1;     // Panels pass through slots of shared memory.
  static constexpr int kSmallPanels = 2;  // Panels of one unit each pass through slots of shared memory.
};

// What follows from the choices.
template <class Config>
struct HaloChoices {
  // Whether asynchronous copies bring rows of channels.
  static constexpr bool kCopiesRows = Config::kInput == Input::kCopied ||
                                      Config::kInput == Input::kRewritten ||
                                      Config::kInput == Input::kInRegisters;
  // Whether the input holds operands as tensor cores take them: 16-bit types, or rounded float32.
  static constexpr bool kOperands =
      Config::kInput == Input::kRewritten || sizeof(typename Config::Scalar) == 2;
  // Whether a block may have only some chunks of a tile.
  static constexpr bool kDividesTiles =
      Config::kDivision == Division::kBlocks || Config::kDivision == Division::kLastTiles;
};

}  // namespace tconv3d
