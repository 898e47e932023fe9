// Epilogues: operations on a finished sum before it is rounded and stored. The kernels of the forward pass
// take one of these structs as Config::Epilogue.
//
// An epilogue is an activation (`apply`): ReLU, or any expression. It says whether the kernel also stores the
// moments of its outputs (moments.cuh) for a norm layer that follows, which saves a pass over memory, and
// whether the expression has operands besides the sum (kHasOperands): numbers of each channel of a batch item
// (vectors) and tensors of y's shape and strides, or with fewer batch items or channels (whole tensors).
// Kernels call finish(), which knows both. kOverChannels: a program over the channels of every position
// follows it (over_channels.cuh).
#pragma once

#include "common.cuh"
#include "expressions.cuh"

namespace tconv3d {

struct Identity {
  static constexpr bool kLeavesMoments = false, kHasOperands = false, kOverChannels = false;
  static constexpr bool kOnePerPosition = false;
  template <class Acc>
  static __device__ __forceinline__ Acc apply(Acc sum) {
    return sum;
  }
};

struct Relu {
  static constexpr bool kLeavesMoments = false, kHasOperands = false, kOverChannels = false;
  static constexpr bool kOnePerPosition = false;
  static __device__ __forceinline__ float apply(float sum) { return ptx::max_or_nan(sum, 0.0f); }
  static __device__ __forceinline__ double apply(double sum) { return sum < 0 ? 0 : sum; }  // NaN stays NaN
};

// Any expression (expressions.cuh) of the sum alone. kRounded: the sum's products are of TF32 or 16-bit
// numbers.
template <class Expression, bool kRounded>
struct Evaluated {
  static constexpr bool kLeavesMoments = false, kHasOperands = false, kOverChannels = false;
  static constexpr bool kOnePerPosition = false;
  template <class Acc>
  static __device__ __forceinline__ Acc apply(Acc sum) {
    return Expression::of(OnlyValue<Acc, kRounded>{sum});
  }
};

// How a whole tensor lies in memory: the type of its elements; whether it has one batch item, for all of y's;
// and how many channels share each of its elements, 1 or all. kLast: y is channels-last.
template <class Element, bool kOneItem, int kChannels, bool kChannelsLast>
struct Read {
  using Type = Element;
  static constexpr bool kForAll = kOneItem, kLast = kChannelsLast;
  static constexpr int kSharing = kChannels;
};
// Any expression of the sum, of kVectorCount vectors and of kWholeCount whole tensors. The kernel's Args then
// have the members tail_vectors, [vector][batch item][channel], tail_whole_0 and so on, and tail. kAlign is a
// power of two that divides the channels of a group.
template <class Expression, bool kFromRounded, int kVectorCount, int kWholeCount, int kAlign>
struct EvaluatedWith {
  static constexpr bool kLeavesMoments = false, kHasOperands = true, kOverChannels = false;
  static constexpr bool kOnePerPosition = false;
  static constexpr int kVectors = kVectorCount, kWholes = kWholeCount, kAlignedChannels = kAlign;

  // The operands of an output.
  template <class Accumulator>
  struct Operands {
    using Acc = Accumulator;
    static constexpr bool kRounded = kFromRounded;
    static constexpr int kLocals = 0;
    Acc sum;
    Acc vectors[kVectors > 0 ? kVectors : 1], wholes[kWholes > 0 ? kWholes : 1];
    __device__ __forceinline__ Acc value() const { return sum; }
    template <int kIndex>
    __device__ __forceinline__ Acc vector() const {
      return vectors[kIndex];
    }
    template <int kIndex>
    __device__ __forceinline__ Acc whole() const {
      return wholes[kIndex];
    }
  };
  template <class Acc>
  static __device__ __forceinline__ Acc apply(const Operands<Acc>& operands) {
    return Expression::of(operands);
  }
  // How whole tensor kIndex lies in memory.
  template <int kIndex, class Scalar>
  static __device__ constexpr auto kind() {
    return Read<Scalar, false, 1, false>{};
  }
};

// Any expression with operands, one of whose whole tensors at least lies otherwise than y.
template <class Expression, bool kFromRounded, int kVectorCount, int kWholeCount, int kAlign, class First,
          class Second, class Third, class Fourth>
struct EvaluatedReading : EvaluatedWith<Expression, kFromRounded, kVectorCount, kWholeCount, kAlign> {
  template <int kIndex, class Scalar>
  static __device__ constexpr auto kind() {
    if constexpr (kIndex == 0) {
      return First{};
    } else if constexpr (kIndex == 1) {
      return Second{};
    } else if constexpr (kIndex == 2) {
      return Third{};
    } else {
      return Fourth{};
    }
  }
};

template <class Activation>
struct LeavingMoments : Activation {
  static constexpr bool kLeavesMoments = true;
};

// ---- Operands in memory. `Arguments` is the kernel's Args.

// Outputs that a thread stores next to each other: of one channel, or of neighbouring channels.
struct OutputRun {
  int n, channel;    // batch item and channel of the first output
  long long offset;  // element of y where the first output lies
  long long step;    // elements of y from one output to the next
  int present;       // how many of the outputs exist; operands of the others are not read
};

template <class Acc, class Arguments>
__device__ __forceinline__ const Acc* vectors_of(const Arguments& args, int n, int channel) {
  return static_cast<const Acc*>(args.tail_vectors) + static_cast<long long>(n) * args.tail.channels +
         channel;
}

template <int kIndex, class Scalar, class Arguments>
__device__ __forceinline__ const Scalar* whole_of(const Arguments& args) {
  if constexpr (kIndex == 0) {
    return static_cast<const Scalar*>(args.tail_whole_0);
  } else if constexpr (kIndex == 1) {
    return static_cast<const Scalar*>(args.tail_whole_1);
  } else if constexpr (kIndex == 2) {
    return static_cast<const Scalar*>(args.tail_whole_2);
  } else {
    return static_cast<const Scalar*>(args.tail_whole_3);
  }
}

// Loads the vectors of one channel of a batch item.
template <class Operands, int kVectors, class Arguments>
__device__ __forceinline__ void load_vectors(const Arguments& args, int n, int channel, Operands& to) {
  if constexpr (kVectors > 0) {
    const auto* const from = vectors_of<typename Operands::Acc>(args, n, channel);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) to.vectors[i] = __ldg(from + i * args.tail.pitch);
  }
}

// Loads the vectors of a run, by wide loads where the run's channels lie at a multiple of their number.
template <class Epilogue, bool kChannels, class Operands, class Arguments, int kCount>
__device__ __forceinline__ void load_vectors_of_run(const Arguments& args, const OutputRun& run,
                                                    Operands (&to)[kCount]) {
  using Acc = typename Operands::Acc;
  if constexpr (kChannels && Epilogue::kVectors > 0 && Epilogue::kAlignedChannels % kCount == 0) {
    TCONV3D_ASSUME(run.channel % kCount == 0);
    if (run.present < 1) return;
    const Acc* const from = vectors_of<Acc>(args, run.n, run.channel);
#pragma unroll
    for (int i = 0; i < Epilogue::kVectors; ++i) {
      const auto values = load_vector<kCount>(from + i * args.tail.pitch);
#pragma unroll
      for (int c = 0; c < kCount; ++c) to[c].vectors[i] = values.at[c];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kChannels ? i < run.present : run.present > 0)
        load_vectors<Operands, Epilogue::kVectors>(args, run.n, run.channel + (kChannels ? i : 0), to[i]);
    }
  }
}

// Where the first element of a whole tensor for a run lies, and how far apart they are.
struct WholeRun {
  long long place, step;
};
template <class Kind, bool kChannels, class Arguments>
__device__ __forceinline__ WholeRun whole_run(const Arguments& args, const OutputRun& run) {
  WholeRun found = {run.offset, run.step};
  if constexpr (Kind::kSharing > 1) {
    if constexpr (Kind::kLast) {
      found = {(run.offset - run.channel) / Kind::kSharing, run.step / Kind::kSharing};
    } else {
      found.place -= (run.n * (Kind::kSharing - 1LL) + run.channel) * args.tail.volume;
    }
    if constexpr (kChannels) found.step = 0;
  }
  if constexpr (Kind::kForAll)
    found.place -= run.n * args.tail.volume * (Kind::kSharing > 1 ? 1 : args.tail.channels);
  return found;
}

// Applies the epilogue of Config to a run of sums, in place. kChannels: the run has neighbouring channels.
template <class Config, bool kChannels, class Acc, int kCount, class Arguments = Args>
__device__ __forceinline__ void finish(const Arguments& args, const OutputRun& run, Acc (&sums)[kCount]) {
  using Epilogue = typename Config::Epilogue;
  if constexpr (!Epilogue::kHasOperands) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = Epilogue::apply(sums[i]);
  } else {
    using Scalar = typename Config::Scalar;
    typename Epilogue::template Operands<Acc> operands[kCount] = {};
    static_for<Epilogue::kWholes>([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      using Kind = decltype(Epilogue::template kind<kIndex, Scalar>());
      using Type = typename Kind::Type;
      const WholeRun own = whole_run<Kind, kChannels>(args, run);
      // Whole tensors begin at multiples of 16 bytes, as y does.
      const bool together = own.step == 1 && run.present >= kCount && own.place % kCount == 0;
      const Type* const from = whole_of<kIndex, Type>(args) + own.place;
      Vector<Type, kCount> values = {};
      if (together) {
        values = load_vector<kCount>(from);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (i < run.present) values.at[i] = from[i * own.step];
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) operands[i].wholes[kIndex] = widen<Acc>(values.at[i]);
    });
    load_vectors_of_run<Epilogue, kChannels>(args, run, operands);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      operands[i].sum = sums[i];
      sums[i] = Epilogue::apply(operands[i]);
    }
  }
}

}  // namespace tconv3d
