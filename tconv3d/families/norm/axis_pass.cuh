// One pass over a dense tensor [outer][length][inner] that reduces along its middle axis, several times in a
// row if the program (axis_program.cuh) says so, and stores an expression of the elements or of the positions
// [outer][inner]. x and y may be the same tensor.
//
// - Columns (inner > 1): a thread has kVector neighbouring positions and walks along the axis, so that
//   neighbouring threads load neighbouring vectors. With kHeld a thread writes what it has loaded to shared
//   memory, in slots that it alone reads: later sweeps take it from there, and no barrier is needed.
// - Rows (inner = 1): kLanes threads share a position, and a thread has kVector neighbours of the axis. Later
//   sweeps read the row again, which L1 still holds.
// Sums are added in a fixed order: along the axis by a thread, then over its lanes.
//
// The pass can also add up expressions of the elements over all positions (of a batch item, if channels are
// the axis), while it stores the result: the gradients of parameters that vary along the axis. A block then
// has many positions, and leaves its sums in a slot of its own (axis_sums.cuh).
#pragma once

#include "axis_program.cuh"
#include "axis_sums.cuh"

namespace tconv3d {

template <class C>
struct AxisPass {
  using Scalar = typename C::Scalar;
  using Number = typename C::Acc;
  using Program = typename C::Program;
  static constexpr int kTensors = C::kWholes + 1;  // x and the further tensors of its shape
  static constexpr int kOwn = C::kRows ? 1 : C::kVector;
  static constexpr int kNumbers = C::kPlaced + Program::Steps::kCount;
  static constexpr int kFlight = 4;  // vectors whose loads are in flight at a time
  static constexpr int kAlong =
      8;  // whole<kAlong + i>() is operand i that depends on the place along the axis
  // Threads of a warp add their columns' elements together, so that those without a position go along.
  static constexpr bool kSumsColumns = C::Sums::kCount > 0 && !C::kRows;
  static_assert(C::kVector * C::kLanes >= 1 && (C::kRows || C::kLanes == 1), "lanes share a row");
  static_assert(!(C::kRows && C::kHeld), "only columns are held in shared memory");

  struct Items {
    Vector<Scalar, C::kVector> of[kTensors];
  };

  // The operands of an expression for one element; an expression of a position sees the first one of its
  // axis.
  struct Element {
    using Acc = Number;
    static constexpr bool kRounded = sizeof(Scalar) == 2;
    static constexpr int kLocals = kNumbers;
    const Args& args;
    const Acc* vectors;  // the numbers of the element's channel and batch item, `rows` apart
    const Acc* along;    // the numbers of the element's place along the axis, `length` apart
    const Acc* numbers;  // the numbers of the position
    Acc values[kTensors];
    __device__ __forceinline__ Acc value() const { return values[0]; }
    template <int kIndex>
    __device__ __forceinline__ Acc vector() const {
      return vectors[kIndex * args.rows];
    }
    template <int kIndex>
    __device__ __forceinline__ Acc whole() const {
      if constexpr (kIndex >= kAlong) {
        return along[(kIndex - kAlong) * static_cast<long long>(args.length)];
      } else {
        return values[kIndex + 1];
      }
    }
    template <int kIndex>
    __device__ __forceinline__ Acc local() const {
      return numbers[kIndex];
    }
  };

  const Args& args;
  bool exists;
  long long outer, inner;  // the thread's first position
  int begin, step, end;    // along the axis
  long long row;           // batch item * channels + channel, of the first element of the axis
  Number numbers[kOwn][kNumbers > 0 ? kNumbers : 1];

  // The number of threads that all positions take.
  static __device__ __forceinline__ long long threads(const Args& args) {
    return args.outer * (C::kRows ? C::kLanes : args.inner / C::kVector);
  }

  __device__ __forceinline__ AxisPass(const Args& all, long long thread, bool has_position)
      : args(all), exists(has_position) {
    if constexpr (C::kRows) {
      outer = thread / C::kLanes;
      inner = 0;
      begin = static_cast<int>(thread % C::kLanes) * C::kVector;
    } else {
      const long long vectors = args.inner / C::kVector;
      outer = thread / vectors;
      inner = thread % vectors * C::kVector;
      begin = 0;
    }
    step = C::kRows ? C::kLanes * C::kVector : 1;
    end = exists || kSumsColumns ? args.length : 0;
    if (!exists) outer = inner = 0;
    const long long lead = outer / args.lead;
    // With channels last and an axis of space the channel is the place in `inner`, which row_of adds.
    row = C::kAxisIsChannels || C::kChannelsLast ? lead * args.channels : lead;
    TCONV3D_ASSUME(args.inner % C::kVector == 0 || C::kRows);
    TCONV3D_ASSUME(!C::kRows || (args.inner == 1 && args.length % C::kVector == 0));
    static_for<C::kPlaced>([&](auto p) {
#pragma unroll
      for (int v = 0; v < kOwn; ++v) {
        const long long all_positions = args.outer * args.inner;
        numbers[v][p] = static_cast<const Number*>(args.placed)[p * all_positions + position() + v];
      }
    });
  }

  __device__ __forceinline__ long long position() const { return outer * args.inner + inner; }
  __device__ __forceinline__ long long place(int l) const {
    return (outer * args.length + l) * args.inner + inner;
  }
  __device__ __forceinline__ long long row_of(int l, int v) const {
    if constexpr (C::kAxisIsBatch) {
      const int at = C::kRows ? 0 : v;
      const long long channel = C::kChannelsLast ? (inner + at) % args.channels : (inner + at) / args.lead;
      return static_cast<long long>(l + v - at) * args.channels + channel;
    } else if constexpr (C::kAxisIsChannels) {
      return row + l + (C::kRows ? v : 0);
    } else if constexpr (C::kChannelsLast) {
      return row + (inner + v) % args.channels;
    } else {
      return row;
    }
  }

  // Element v of the vectors `items` at place l of the axis.
  __device__ __forceinline__ Element element(const Items& items, int l, int v) const {
    Element found = {args, nullptr, nullptr, numbers[C::kRows ? 0 : v], {}};
    if constexpr (C::kVectors > 0) found.vectors = static_cast<const Number*>(args.vectors) + row_of(l, v);
    if constexpr (C::kAlongs > 0)
      found.along = static_cast<const Number*>(args.along) + l + (C::kRows ? v : 0);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) found.values[t] = widen<Number>(items.of[t].at[v]);
    return found;
  }

  template <bool kFirst>
  __device__ __forceinline__ Items fetch(int l) const {
    const void* const tensors[] = {args.x, args.whole_0, args.whole_1, args.whole_2, args.whole_3};
    Items items;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      auto* const held = dynamic_shared<Vector<Scalar, C::kVector>>() + (l * kTensors + t) * C::kThreads +
                         static_cast<int>(threadIdx.x);
      if constexpr (C::kHeld && !kFirst) {
        items.of[t] = *held;
      } else {
        items.of[t] = load_vector<C::kVector>(static_cast<const Scalar*>(tensors[t]) + place(l));
        if constexpr (C::kHeld) *held = items.of[t];
      }
    }
    return items;
  }

  // Calls use(l, items) for every vector of the thread. Several vectors are loaded before they are used.
  template <bool kFirst, class Use>
  __device__ __forceinline__ void sweep(Use&& use) const {
    for (int l = begin; l < end; l += kFlight * step) {
      Items items[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (l + i * step < end) items[i] = fetch<kFirst>(l + i * step);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (l + i * step < end) use(l + i * step, items[i]);
      }
    }
  }

  template <class Step, bool kFirst, int kNumber>
  __device__ __forceinline__ void reduce() {
    typename Step::Way::template State<Number> states[kOwn];
    sweep<kFirst>([&](int l, const Items& items) {
#pragma unroll
      for (int v = 0; v < C::kVector; ++v)
        states[C::kRows ? 0 : v].take(Step::Of::of(element(items, l, v)), l + (C::kRows ? v : 0));
    });
#pragma unroll
    for (int v = 0; v < kOwn; ++v) {
#pragma unroll
      for (int distance = C::kLanes / 2; distance > 0; distance /= 2) states[v].merge(distance);
      numbers[v][kNumber] = states[v].result();
    }
  }

  // Runs steps, of which the first gives number kNumber. kFirst: no step before them has read the tensors.
  template <class Steps, bool kFirst, int kNumber>
  __device__ __forceinline__ void run_steps() {
    if constexpr (Steps::kCount > 0) {
      using Step = typename Steps::First;
      if constexpr (Step::kReduces) {
        reduce<Step, kFirst, kNumber>();
      } else {
#pragma unroll
        for (int v = 0; v < kOwn; ++v) numbers[v][kNumber] = Step::Of::of(element(Items{}, 0, v));
      }
      run_steps<typename Steps::Rest, kFirst && !Step::kReduces, kNumber + 1>();
    }
  }

  __device__ __forceinline__ void run(AxisSums<C>& sums) {
    run_steps<typename Program::Steps, true, C::kPlaced>();
    using Result = typename C::Result;
    using Of = typename Program::Final::Of;
    Result* const y = static_cast<Result*>(args.y);
    if constexpr (Program::Final::kEach) {
      sweep<!Program::Steps::kReduces>([&](int l, const Items& items) {
        Vector<Result, C::kVector> results;
        Number summed[C::kVector][C::Sums::kCount > 0 ? C::Sums::kCount : 1] = {};
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) {
          results.at[v] = Narrow<Result>::from(Of::of(element(items, l, v)));
          if constexpr (C::Sums::kCount > 0) C::Sums::template add<0>(summed[v], element(items, l, v));
        }
        if constexpr (C::Sums::kCount > 0) sums.add(l, summed, exists);
        if (!kSumsColumns || exists) *reinterpret_cast<Vector<Result, C::kVector>*>(y + place(l)) = results;
      });
    } else if (exists && begin == 0) {
      Vector<Result, kOwn> results;
#pragma unroll
      for (int v = 0; v < kOwn; ++v) results.at[v] = Narrow<Result>::from(Of::of(element(Items{}, 0, v)));
      *reinterpret_cast<Vector<Result, kOwn>*>(y + position()) = results;
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  AxisSums<C> sums(args.length, args.held_bytes);
  const long long threads = AxisPass<C>::threads(args);
  if constexpr (C::Sums::kCount == 0) {
    const long long thread = static_cast<long long>(blockIdx.x) * C::kThreads + threadIdx.x;
    AxisPass<C>(args, thread, thread < threads).run(sums);
  } else {
    const long long items = C::kAxisIsChannels ? args.rows / args.channels : 1, count = threads / items;
    const long long item = blockIdx.x / args.slots, slot = blockIdx.x % args.slots;
    for (long long at = slot * C::kThreads; at < count; at += args.slots * C::kThreads) {
      const long long thread = at + threadIdx.x;
      AxisPass<C>(args, item * count + thread, thread < count).run(sums);
    }
    sums.store(static_cast<typename C::Acc*>(args.sums) + item * args.length * args.slots * C::Sums::kCount,
               args.slots, slot);
  }
}

}  // namespace tconv3d
