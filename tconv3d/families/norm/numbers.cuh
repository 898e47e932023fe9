// Computes small tensors between two passes: numbers per channel, per norm group or fewer, out of the sums of
// a pass and of parameters. One block interprets a program, which comes with the arguments, so that one
// compiled kernel computes all of them and takes the place of dozens of launches.
//
// A program is a list of steps, one after the other. A step either evaluates instructions for every index i <
// count, some of which store; or it adds up what they give for the `extent` indices of every sum, and writes
// the sums, divided by a number, to scratch. Everything is computed in float64, and sums are added in an
// order that depends on the program alone. numbers.py has the layout of steps and instructions.
#pragma once

#include "cursor.cuh"
#include "expressions.cuh"

namespace tconv3d {

// The end of a list of operations.
struct NoOperation {
  template <class In>
  static __device__ __forceinline__ double evaluate(int, const In&) {
    return 0;
  }
};

// An operation of three local numbers (expressions.cuh), and the operations after it.
template <class First, class Rest>
struct OperationList {
  template <class In>
  static __device__ __forceinline__ double evaluate(int index, const In& in) {
    return index == 0 ? First::of(in) : Rest::evaluate(index - 1, in);
  }
};

// The operands of an instruction.
struct ThreeNumbers {
  using Acc = double;
  static constexpr bool kRounded = false;
  static constexpr int kLocals = 3;
  double at[3];
  template <int kIndex>
  __device__ __forceinline__ double local() const {
    return at[kIndex];
  }
};

// The types of elements, in the order of numbers.py.
__device__ __forceinline__ double load_number(const void* from, int place, int type) {
  switch (type) {
    case 0:
      return static_cast<const double*>(from)[place];
    case 1:
      return static_cast<const float*>(from)[place];
    case 2:
      return widen<float>(static_cast<const BFloat16*>(from)[place]);
    case 3:
      return widen<float>(static_cast<const Half*>(from)[place]);
    case 4:
      return static_cast<double>(static_cast<const long long*>(from)[place]);
    default:
      return static_cast<const unsigned char*>(from)[place];
  }
}
__device__ __forceinline__ void store_number(void* to, int place, int type, double value) {
  switch (type) {
    case 0:
      static_cast<double*>(to)[place] = value;
      break;
    case 1:
      static_cast<float*>(to)[place] = static_cast<float>(value);
      break;
    case 2:
      static_cast<BFloat16*>(to)[place] = Narrow<BFloat16>::from(static_cast<float>(value));
      break;
    case 3:
      static_cast<Half*>(to)[place] = Narrow<Half>::from(static_cast<float>(value));
      break;
    case 4:
      static_cast<long long*>(to)[place] = static_cast<long long>(value);
      break;
    default:
      static_cast<unsigned char*>(to)[place] = value != 0;
  }
}

template <class C>
struct Interpreter {
  static constexpr int kNumber = 0, kLoad = 1, kStore = 2, kOperations = 3;  // the first operations' codes

  const Args& args;
  void* const tensors[16];
  double registers[C::kRegisters];

  explicit __device__ __forceinline__ Interpreter(const Args& args)
      : args(args),
        tensors{args.tensor_0,  args.tensor_1,  args.tensor_2,  args.tensor_3, args.tensor_4,  args.tensor_5,
                args.tensor_6,  args.tensor_7,  args.tensor_8,  args.tensor_9, args.tensor_10, args.tensor_11,
                args.tensor_12, args.tensor_13, args.tensor_14, args.tensor_15},
        registers{} {}

  // Returns where an operand's element for an index lies: a number of levels, each with its size and stride.
  __device__ __forceinline__ int place(const int* word, int index) const {
    int found = word[1], rest = index;
    const int levels = word[0];
    for (int i = 0; i < levels; ++i) {
      const int size = word[2 + 2 * i], stride = word[3 + 2 * i], above = rest / size;
      found += (rest - above * size) * stride;
      rest = above;
    }
    return found;
  }

  // Interprets the instructions in the words from `at` to `end` for an index.
  __device__ __forceinline__ void interpret(int at, int end, int index) {
    while (at < end) {
      const int* const word = args.words + at;
      const int code = word[0] & 255, to = word[0] >> 8 & 255, operand = word[0] >> 16 & 255;
      const int more = word[0] >> 24 & 255;  // the second operand of an operation, or the type of an element
      if (code == kNumber) {
        registers[to] = args.numbers[operand];
        at += 1;
      } else if (code == kLoad) {
        registers[to] = load_number(tensors[operand], place(word + 1, index), more);
        at += 3 + 2 * word[1];
      } else if (code == kStore) {
        store_number(tensors[operand], place(word + 1, index), more, registers[to]);
        at += 3 + 2 * word[1];
      } else {
        const ThreeNumbers given = {{registers[operand], registers[more], registers[word[1]]}};
        registers[to] = C::Operations::evaluate(code - kOperations, given);
        at += 2;
      }
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  constexpr int kWarps = C::kThreads / 32;
  __shared__ double of_warps[kWarps];
  Interpreter<C> machine(args);
  const int thread = static_cast<int>(threadIdx.x);
  int at = 0;
  for (int step = 0; step < args.steps; ++step) {
    const int* const word = args.words + at;
    const int count = word[0], extent = word[1], first = at + 6, end = first + word[2];
    if (extent == 0) {
      for (int i = thread; i < count; i += C::kThreads) machine.interpret(first, end, i);
    } else {
      const int team = word[3], result = word[4] & 255, divisor = word[4] >> 8, base = word[5];
      double* const scratch = static_cast<double*>(args.tensor_0) + base;
      for (int some = 0; some < count; some += C::kThreads / team) {
        const int i = some + thread / team;
        double sum = 0;
        if (i < count) {
          for (int k = thread % team; k < extent; k += team) {
            machine.interpret(first, end, i * extent + k);
            sum += machine.registers[result];
          }
        }
        sum = warp_sum(sum);
        if (thread % 32 == 0) of_warps[thread / 32] = sum;
        __syncthreads();
        if (i < count && thread % team == 0) {
          for (int k = 1; k < team / 32; ++k) sum += of_warps[thread / 32 + k];
          scratch[i] = sum / args.numbers[divisor];
        }
        __syncthreads();
      }
    }
    __syncthreads();
    at = end;
  }
}

}  // namespace tconv3d
