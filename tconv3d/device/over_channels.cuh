// What is computed over the channels of a position where the sums still are in registers, as a program
// (axis_program.cuh) whose axis is the channels: softmax over channels, or log-sum-exp, for example.
//
// A kernel may do so if a few lanes of one warp hold all channels of a position. It first applies the
// pointwise part of the epilogue, then calls run() for every position, and stores either the values as it
// always does, or the one number of the position (store_number).
#pragma once

#include "axis_program.cuh"
#include "epilogue.cuh"

namespace tconv3d {

// An epilogue: a pointwise part, and a program behind it. A result with one number per position has elements
// of type `Number`. kFromRounded: the sums' products are of TF32 or 16-bit numbers.
template <class Pointwise, class All, class Number, bool kFromRounded>
struct OverChannels : Pointwise {
  static constexpr bool kOverChannels = true, kOnePerPosition = !All::Final::kEach, kRounded = kFromRounded;
  using Program = All;
  using Result = Number;
};

template <class C>
struct ChannelProgram {
  using Epilogue = typename C::Epilogue;
  using Program = typename Epilogue::Program;
  using Result = typename Epilogue::Result;
  using Final = typename Program::Final::Of;
  static constexpr int kNumbers = Program::Steps::kCount;

  // The operands of an expression: a channel's value, and the numbers of its position.
  struct Operands {
    using Acc = float;
    static constexpr bool kRounded = Epilogue::kRounded;
    static constexpr int kLocals = kNumbers;
    float own;
    const float (&numbers)[kNumbers];
    __device__ __forceinline__ float value() const { return own; }
    template <int kIndex>
    __device__ __forceinline__ float local() const {
      return numbers[kIndex];
    }
  };

  // Runs the program for one position, whose channels kLanes neighbouring lanes share; all lanes of the warp
  // call it. The lane has the channels channel(0), channel(1), ... in rising order, of which those from
  // `channels` on do not exist. The results of the channels take the place of their values; the number of a
  // position takes the place of the first.
  template <int kLanes, int kOwn, class Channel>
  static __device__ __forceinline__ void run(float (&values)[kOwn], int channels, const Channel& channel) {
    float numbers[kNumbers];
    run_steps<typename Program::Steps, 0, kLanes>(values, channels, channel, numbers);
    if constexpr (Epilogue::kOnePerPosition) {
      values[0] = Final::of(Operands{0.0f, numbers});
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) values[i] = Final::of(Operands{values[i], numbers});
    }
  }

  // Stores the number of a position of batch item n. `offset` is the element of y, if y had all channels,
  // where the position's first channel would lie, and `stride` the elements from one channel to the next.
  template <bool kChannelsLast>
  static __device__ __forceinline__ void store_number(void* y, long long offset, int n, long long stride,
                                                      int channels, float number) {
    const long long place = kChannelsLast ? offset / channels : offset - n * (channels - 1) * stride;
    static_cast<Result*>(y)[place] = Narrow<Result>::from(number);
  }

 private:
  template <class Steps, int kNumber, int kLanes, int kOwn, class Channel>
  static __device__ __forceinline__ void run_steps(const float (&values)[kOwn], int channels,
                                                   const Channel& channel, float (&numbers)[kNumbers]) {
    if constexpr (Steps::kCount > 0) {
      using Step = typename Steps::First;
      if constexpr (Step::kReduces) {
        typename Step::Way::template State<float> state;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (channel(i) < channels) state.take(Step::Of::of(Operands{values[i], numbers}), channel(i));
        }
#pragma unroll
        for (int distance = kLanes / 2; distance > 0; distance /= 2) state.merge(distance);
        numbers[kNumber] = state.result();
      } else {
        numbers[kNumber] = Step::Of::of(Operands{0.0f, numbers});
      }
      run_steps<typename Steps::Rest, kNumber + 1, kLanes>(values, channels, channel, numbers);
    }
  }
};

}  // namespace tconv3d
