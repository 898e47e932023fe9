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
// have the members tail_vectors, tail_whole_0 and so on, and tail. The vectors lie side by side, [batch
// item][channel][vector], with so many numbers for each channel that these are a power of two. kAlign is a
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
//
// A load of global memory takes hundreds of cycles, so that a kernel loads the whole tensors of several runs
// of outputs before it uses the first of them (finish_runs), and calls them into L2 even earlier, before it
// waits for the products (prefetch_run). Loads are unconditional instructions under a predicate: between
// branches, the compiler would not move one load before the use of another.

// Outputs that a thread stores next to each other: of one channel, or of neighbouring channels.
struct OutputRun {
  int n, channel;    // batch item and channel of the first output
  long long offset;  // element of y where the first output lies
  long long step;    // elements of y from one output to the next
  int present;       // how many of the outputs exist; operands of the others are not read
};

// The numbers of operands of an epilogue, which are zero for those that have none.
template <class Epilogue, bool kHasOperands = Epilogue::kHasOperands>
struct OperandCounts {
  static constexpr int kVectors = 0, kWholes = 0;
};
template <class Epilogue>
struct OperandCounts<Epilogue, true> {
  static constexpr int kVectors = Epilogue::kVectors, kWholes = Epilogue::kWholes;
};

// Loads neighbours that the kernel does not write if the condition holds; otherwise returns zeros, and the
// address may be any.
template <int kCount, class T>
__device__ __forceinline__ Vector<T, kCount> load_vector_if(bool condition, const T* address) {
  Vector<T, kCount> vector = {};
  if constexpr (sizeof(vector) >= 16) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(vector) / 16); ++i) {
      ptx::load_constant_if(condition, reinterpret_cast<const uint4*>(address) + i,
                            reinterpret_cast<uint4*>(&vector)[i]);
    }
  } else if constexpr (sizeof(vector) == 8) {
    ptx::load_constant_if(condition, address, *reinterpret_cast<uint2*>(&vector));
  } else if constexpr (sizeof(vector) == 4) {
    ptx::load_constant_if(condition, address, *reinterpret_cast<unsigned*>(&vector));
  } else {
    ptx::load_constant_if(condition, address, *reinterpret_cast<unsigned short*>(&vector));
  }
  return vector;
}

// The vectors of kChannels neighbouring channels of a batch item, in registers.
template <class Config, class Acc, int kChannels>
struct ChannelVectors {
  static constexpr int kVectors = OperandCounts<typename Config::Epilogue>::kVectors;
  static constexpr int kNumbers =  // in memory, for each channel
      kVectors <= 1   ? 1
      : kVectors <= 2 ? 2
      : kVectors <= 4 ? 4
      : kVectors <= 8 ? 8
                      : 16;
  Acc at[kChannels][kVectors > 0 ? kVectors : 1];

  // Loads the vectors of the first `present` of the channels from `channel` on.
  template <class Arguments>
  static __device__ __forceinline__ ChannelVectors load(const Arguments& args, int n, int channel,
                                                        int present) {
    ChannelVectors found = {};
    if constexpr (kVectors > 0) {
      const long long place = static_cast<long long>(n) * args.tail.channels + channel;
      const Acc* const from = static_cast<const Acc*>(args.tail_vectors) + place * kNumbers;
      constexpr bool kAligned = Config::Epilogue::kAlignedChannels % kChannels == 0;
      // Neighbouring channels all exist where their number divides the channels of a group.
      constexpr int kAtOnce = kAligned ? kChannels : 1;
      TCONV3D_ASSUME(present < 1 || channel % kAtOnce == 0);
#pragma unroll
      for (int first = 0; first < kChannels; first += kAtOnce) {
        const auto numbers = load_vector_if<kAtOnce * kNumbers>(first < present, from + first * kNumbers);
#pragma unroll
        for (int i = 0; i < kAtOnce * kVectors; ++i)
          found.at[first + i / kVectors][i % kVectors] = numbers.at[i / kVectors * kNumbers + i % kVectors];
      }
    }
    return found;
  }
};

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

// The elements of the whole tensors, from number kIndex on, for a run of kCount outputs, in registers.
template <class Config, int kCount, int kIndex = 0,
          bool kExists = (kIndex < OperandCounts<typename Config::Epilogue>::kWholes)>
struct WholeValues {};
template <class Config, int kCount, int kIndex>
struct WholeValues<Config, kCount, kIndex, true> {
  using Kind = decltype(Config::Epilogue::template kind<kIndex, typename Config::Scalar>());
  Vector<typename Kind::Type, kCount> own;
  WholeValues<Config, kCount, kIndex + 1> others;

  template <int kWanted>
  __device__ __forceinline__ auto& of() {
    if constexpr (kWanted == kIndex) {
      return own;
    } else {
      return others.template of<kWanted>();
    }
  }
};

// How the outputs of a run lie in memory: anyhow, or all exist, if any does, as neighbours at a multiple of
// their number.
enum class Lie { kAnyhow, kAsVector };

// Loads whole tensor kIndex for several runs: each run by one access, or each element by its own. That is one
// branch around loads that are all independent of each other.
template <class Config, bool kChannels, Lie kLie, int kIndex, int kCount, int kRuns, class Arguments>
__device__ __forceinline__ void load_whole(const Arguments& args, const OutputRun (&runs)[kRuns],
                                           WholeValues<Config, kCount> (&to)[kRuns]) {
  using Kind = decltype(Config::Epilogue::template kind<kIndex, typename Config::Scalar>());
  const auto* const whole = whole_of<kIndex, typename Kind::Type>(args);
  WholeRun own[kRuns];
  bool together = true;
  unsigned places = 0;
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    own[r] = whole_run<Kind, kChannels>(args, runs[r]);
    const bool exists = runs[r].present > 0;
    together = together & (!exists | ((own[r].step == 1) & (runs[r].present >= kCount)));
    places |= exists ? static_cast<unsigned>(own[r].place) : 0u;
  }
  // Whole tensors begin at multiples of 16 bytes, as y does.
  const bool vectors = kCount == 1 || (together && places % kCount == 0);
  // What has one element for all channels of a run has no neighbours there.
  constexpr bool kVectors = kLie == Lie::kAsVector && !(kChannels && Kind::kSharing > 1);
  if constexpr (kVectors) TCONV3D_ASSUME(vectors);
  if (kVectors || vectors) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
      to[r].template of<kIndex>() = load_vector_if<kCount>(runs[r].present > 0, whole + own[r].place);
  } else {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto one = load_vector_if<1>(i < runs[r].present, whole + own[r].place + i * own[r].step);
        to[r].template of<kIndex>().at[i] = one.at[0];
      }
    }
  }
}
template <class Config, bool kChannels, Lie kLie, int kCount, int kRuns, class Arguments>
__device__ __forceinline__ void load_wholes(const Arguments& args, const OutputRun (&runs)[kRuns],
                                            WholeValues<Config, kCount> (&to)[kRuns]) {
  static_for<OperandCounts<typename Config::Epilogue>::kWholes>(
      [&](auto index) { load_whole<Config, kChannels, kLie, decltype(index)::value>(args, runs, to); });
}

// Calls the whole tensors of a run of kCount outputs into L2, without waiting for them. Of neighbouring runs,
// the one that has the first byte of a sector of 32 bytes calls it.
template <class Config, bool kChannels, int kCount, class Arguments>
__device__ __forceinline__ void prefetch_run(const Arguments& args, const OutputRun& run) {
  static_for<OperandCounts<typename Config::Epilogue>::kWholes>([&](auto index) {
    constexpr int kIndex = decltype(index)::value;
    using Kind = decltype(Config::Epilogue::template kind<kIndex, typename Config::Scalar>());
    using Type = typename Kind::Type;
    const WholeRun own = whole_run<Kind, kChannels>(args, run);
    const int count = run.present < kCount ? run.present : kCount;
    const Type* const last = whole_of<kIndex, Type>(args) + own.place + (count - 1) * own.step;
    const auto end = static_cast<unsigned>(reinterpret_cast<unsigned long long>(last)) + sizeof(Type) - 1;
    const bool first = own.step != 1 || end % 32 < count * sizeof(Type);
    ptx::call_into_l2_if(run.present > 0 && first, last);
  });
}

// Applies the epilogue to a run of sums, in place, with operands that are in registers.
template <class Config, bool kChannels, class Acc, int kCount>
__device__ __forceinline__ void apply_to_run(
    const ChannelVectors<Config, Acc, (kChannels ? kCount : 1)>& vectors, WholeValues<Config, kCount>& wholes,
    Acc (&sums)[kCount]) {
  using Epilogue = typename Config::Epilogue;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    typename Epilogue::template Operands<Acc> operands = {};
    operands.sum = sums[i];
#pragma unroll
    for (int v = 0; v < Epilogue::kVectors; ++v) operands.vectors[v] = vectors.at[kChannels ? i : 0][v];
    if constexpr (Epilogue::kWholes > 0) {
      static_for<Epilogue::kWholes>([&](auto index) {
        constexpr int kIndex = decltype(index)::value;
        operands.wholes[kIndex] = widen<Acc>(wholes.template of<kIndex>().at[i]);
      });
    }
    sums[i] = Epilogue::apply(operands);
  }
}

// Applies an epilogue with operands to runs of sums, in place. kChannels: a run has neighbouring channels.
// `vectors` are those of the channels of each run.
template <class Config, bool kChannels, Lie kLie = Lie::kAnyhow, class Acc, int kCount, int kRuns,
          class Arguments>
__device__ __forceinline__ void finish_with(
    const Arguments& args, const OutputRun (&runs)[kRuns],
    const ChannelVectors<Config, Acc, (kChannels ? kCount : 1)> (&vectors)[kRuns],
    Acc (&sums)[kRuns][kCount]) {
  WholeValues<Config, kCount> wholes[kRuns];
  load_wholes<Config, kChannels, kLie>(args, runs, wholes);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) apply_to_run<Config, kChannels>(vectors[r], wholes[r], sums[r]);
}

// Applies the epilogue of Config to runs of sums, in place.
template <class Config, bool kChannels, Lie kLie = Lie::kAnyhow, class Acc, int kCount, int kRuns,
          class Arguments>
__device__ __forceinline__ void finish_runs(const Arguments& args, const OutputRun (&runs)[kRuns],
                                            Acc (&sums)[kRuns][kCount]) {
  using Epilogue = typename Config::Epilogue;
  if constexpr (!Epilogue::kHasOperands) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[r][i] = Epilogue::apply(sums[r][i]);
    }
  } else {
    using Vectors = ChannelVectors<Config, Acc, (kChannels ? kCount : 1)>;
    Vectors vectors[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
      vectors[r] = Vectors::load(args, runs[r].n, runs[r].channel, runs[r].present);
    finish_with<Config, kChannels, kLie>(args, runs, vectors, sums);
  }
}

// Applies the epilogue of Config to one run of sums, in place.
template <class Config, bool kChannels, class Acc, int kCount, class Arguments = Args>
__device__ __forceinline__ void finish(const Arguments& args, const OutputRun& run, Acc (&sums)[kCount]) {
  using Epilogue = typename Config::Epilogue;
  if constexpr (!Epilogue::kHasOperands) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = Epilogue::apply(sums[i]);
  } else {
    const OutputRun runs[1] = {run};
    finish_runs<Config, kChannels>(args, runs, reinterpret_cast<Acc(&)[1][kCount]>(sums));
  }
}

// Returns how many of `all` runs of so many outputs are a portion, for which a thread loads at most kWords
// words of whole tensors at once: enough to hide the latency of memory, and few enough to leave registers for
// sums. Without whole tensors a portion has as many outputs as words, and without operands it is a run.
template <class Config, int kWords = 16>
__device__ constexpr int portion_of(int all, int outputs) {
  constexpr int kWholes = OperandCounts<typename Config::Epilogue>::kWholes;
  if (!Config::Epilogue::kHasOperands) return 1;
  const int bytes = outputs * (kWholes > 0 ? kWholes * static_cast<int>(sizeof(typename Config::Scalar)) : 8);
  const int runs = 4 * kWords / bytes;
  return runs < 1 ? 1 : runs < all ? runs : all;
}
// Calls body(first run, number of runs) for portions of kAll runs.
template <int kAll, int kPortion, class Body>
__device__ __forceinline__ void in_portions(const Body& body) {
  static_for<(kAll + kPortion - 1) / kPortion>([&](auto i) {
    constexpr int kFirst = decltype(i)::value * kPortion, kLeft = kAll - kFirst;
    body(Int<kFirst>{}, Int<(kLeft < kPortion ? kLeft : kPortion)>{});
  });
}

}  // namespace tconv3d
