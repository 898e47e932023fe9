// Both gradients of a layer of 16-bit numbers as matrix products whose operands are gathered from
// channels-last tensors, on Hopper's tensor cores (sm_90a):
//   dx[q][ci]        = sum over (tap, co) of  unfolded[q][tap, co] * weight[ci][tap, co]
//   dw[ci][tap, co]  = sum over q of          unfolded[q][tap, co] * x[q][ci]
// where unfolded[q][tap, co] = dy[stride*q + tap*dilation - padding][co], or 0 outside dy.
//
// A term is one (tap, co). A block computes 64 rows (positions or terms) for each of its consumers and a tile
// of input channels of one of the products, over the whole K or a portion of it: with portions its sums are
// one of several partial results, each laid out like the result, which reduce_gradients.cuh adds. A chunk is
// 64 numbers of K. Neighbouring terms are neighbours in dy and in the weight, so that producers copy 8 of
// them at a time, from wherever they lie, into rows of 128 bytes in shared memory, swizzled. Tensor cores
// read 16-bit operands along rows or across them: K runs along the rows of both operands of dx, and across
// those of dw.
//
// The last blocks add up dy for the bias gradient.
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct GatheredProducts {
  using Scalar = typename C::Scalar;
  static constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
  static constexpr int kRows = 64 * C::kConsumers, kRowBytes = 128, kChunk = 64, kPiece = 8;
  static constexpr int kTerms = C::kOut * C::kKernelD * C::kKernelH * C::kKernelW;
  static constexpr int kTermChunks = (kTerms + kChunk - 1) / kChunk;
  static constexpr int kGroupBytes = 64 * kRowBytes;  // 64 rows
  static constexpr int kFirstBytes = kRows * kRowBytes, kStageBytes = kFirstBytes + C::kColumns * kRowBytes;
  static constexpr int kSteps = 4;                                    // K steps per chunk, 16 numbers each
  static constexpr int kProducers = 128, kLoadRows = kProducers / 8;  // rows that producers copy at once
  static constexpr int kAhead = C::kStages - 2;                       // chunks whose copies are in flight
  static_assert(C::kThreads == kProducers + 128 * C::kConsumers && C::kStages >= 3);
  static_assert(C::kColumns % 64 == 0 && C::kIn % kPiece == 0 && C::kOut % kPiece == 0, "whole pieces");

  static_assert(C::kKernelD + C::kKernelH + C::kKernelW < 32,
                "bits for all taps along each dimension, and one");

  // Which taps of a position of x lie in dy: bits for taps along d, then h, then w. And the offset of its
  // first tap, in positions of dy.
  struct alignas(8) Place {
    unsigned taps;
    int offset;
  };

  const Args& args;
  int thread, warp, lane;
  Place* places;  // places of the block's rows of the product for dx
  unsigned stages, barriers;

  __device__ __forceinline__ GatheredProducts(const Args& args)
      : args(args),
        thread(static_cast<int>(threadIdx.x)),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    unsigned char* const shared = dynamic_shared<unsigned char>();
    stages = ptx::shared_address(shared);
    places = reinterpret_cast<Place*>(shared + C::kStages * kStageBytes);
    barriers = stages + C::kStages * kStageBytes + kRows * static_cast<unsigned>(sizeof(Place));
  }

  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 8 * (C::kStages + stage); }
  __device__ __forceinline__ unsigned first(int stage) const { return stages + stage * kStageBytes; }
  __device__ __forceinline__ unsigned second(int stage) const { return first(stage) + kFirstBytes; }

  // The work of a block: a tile of rows and columns, and a range of chunks of K.
  struct Job {
    bool input_grad;
    int row, column;
    int begin, end, portion;
  };

  __device__ __forceinline__ Job job(int block) const {
    const bool x = block < args.blocks_x;
    const int row_tiles = ((x ? args.rows : kTerms) + kRows - 1) / kRows;
    const int chunks = x ? kTermChunks : (args.rows + kChunk - 1) / kChunk;
    const int portions = x ? args.portions_x : args.portions_w;
    const int own = x ? block : block - args.blocks_x, portion = own % portions, tile = own / portions;
    return {x,
            tile % row_tiles * kRows,
            tile / row_tiles * C::kColumns,
            static_cast<int>(static_cast<long long>(portion) * chunks / portions),
            static_cast<int>(static_cast<long long>(portion + 1) * chunks / portions),
            portion};
  }

  __device__ __forceinline__ void prepare(const Job& job) const {
    if (thread == 0) {
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(full(i), kProducers);
        ptx::barrier_init(empty(i), C::kConsumers * 4);
      }
      ptx::fence_barrier_init();
    }
    if (job.input_grad) {
      for (int i = thread; i < kRows; i += C::kThreads) places[i] = place(job.row + i);
    }
    __syncthreads();
    ptx::launch_dependents();
  }

  // Returns the bits of the taps along one dimension whose outputs exist, from bit kFirst on.
  template <int kFirst, int kKernel, int kDilation>
  static __device__ __forceinline__ unsigned taps(int output, int size) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kKernel; ++i) {
      const bool exists = static_cast<unsigned>(output + i * kDilation) < static_cast<unsigned>(size);
      bits |= exists ? 1u << (kFirst + i) : 0u;
    }
    return bits;
  }

  __device__ __forceinline__ Place place(int row) const {
    const int line = divide(row, args.by_in_w), plane = divide(line, args.by_in_h),
              item = divide(plane, args.by_in_d);
    const int w = (row - line * static_cast<int>(args.by_in_w.divisor)) * C::kStrideW - C::kPaddingW;
    const int h = (line - plane * static_cast<int>(args.by_in_h.divisor)) * C::kStrideH - C::kPaddingH;
    const int d = (plane - item * static_cast<int>(args.by_in_d.divisor)) * C::kStrideD - C::kPaddingD;
    const unsigned bits = taps<0, C::kKernelD, C::kDilationD>(d, args.output.d) |
                          taps<C::kKernelD, C::kKernelH, C::kDilationH>(h, args.output.h) |
                          taps<C::kKernelD + C::kKernelH, C::kKernelW, C::kDilationW>(w, args.output.w);
    return {row < args.rows ? bits : 0u,
            ((item * args.output.d + d) * args.output.h + h) * args.output.w + w};
  }

  // ---- Producers.

  // The address of a piece of 8 numbers in a row, swizzled.
  static __device__ __forceinline__ unsigned at(unsigned to, int row, int piece) {
    return to + row * kRowBytes + ((piece ^ (row % 8)) * 16);
  }

  // Where 8 neighbouring terms lie in dy, from the first tap of a position on, and the bits of their tap.
  struct Tap {
    unsigned bits;
    const Scalar* dy;

    Tap() = default;
    __device__ __forceinline__ Tap(const Args& args, int term) {
      const int tap = term / C::kOut, w = tap % C::kKernelW, h = tap / C::kKernelW % C::kKernelH,
                d = tap / (C::kKernelW * C::kKernelH);
      const bool exists = kTerms % kRows == 0 || term < kTerms;
      // Bit 31 is 0 in all places, so that terms beyond the last exist nowhere.
      bits = exists ? 1u << d | 1u << (C::kKernelD + h) | 1u << (C::kKernelD + C::kKernelH + w) : ~0u;
      const int line = d * C::kDilationD * args.output.h + h * C::kDilationH;
      const long long way = static_cast<long long>(line) * args.output.w + w * C::kDilationW;
      dy = static_cast<const Scalar*>(args.dy) + (way * C::kOut + term % C::kOut);
      ptx::pin(dy);  // or else the sum with a place's offset is multiplied again for every place
    }
    __device__ __forceinline__ void copy(const Place& place, unsigned to) const {
      ptx::copy_piece(to, dy + static_cast<long long>(place.offset) * C::kOut, (place.taps & bits) == bits);
    }
  };

  // A thread copies one piece of every kLoadRows-th row. All these pieces have the same place in their rows.
  __device__ __forceinline__ unsigned own(unsigned to) const { return at(to, thread / 8, thread % 8); }

  __device__ __forceinline__ void copy_for_input_grad(const Job& job, int chunk, int stage) const {
    const int term = chunk * kChunk + thread % 8 * kPiece, column = job.column + thread / 8;
    const Tap tap(args, term);
    const Scalar* const weight =
        static_cast<const Scalar*>(args.weight) + (static_cast<long long>(column) * kTerms + term);
    const unsigned dy_to = own(first(stage)), weight_to = own(second(stage));
    Place its[kRows / kLoadRows];
#pragma unroll
    for (int i = 0; i < kRows / kLoadRows; ++i) its[i] = places[i * kLoadRows + thread / 8];
#pragma unroll
    for (int i = 0; i < kRows / kLoadRows; ++i) tap.copy(its[i], dy_to + i * kLoadRows * kRowBytes);
#pragma unroll
    for (int row = 0; row < C::kColumns; row += kLoadRows) {
      const bool inside =
          (kTerms % kChunk == 0 || term < kTerms) && (C::kIn % C::kColumns == 0 || column + row < C::kIn);
      ptx::copy_piece(weight_to + row * kRowBytes, weight + static_cast<long long>(row) * kTerms, inside);
    }
  }

  __device__ __forceinline__ void copy_for_weight_grad(const Job& job, const Tap (&taps)[C::kConsumers],
                                                       int chunk, int stage) const {
    const int position = chunk * kChunk + thread / 8, in = job.column + thread % 8 * kPiece;
    // The lanes of a warp copy pieces of 16 rows, whose places 16 lanes compute.
    const Place mine = place(chunk * kChunk + lane % 16 / 4 * kLoadRows + warp * 4 + lane % 4);
    const Scalar* const x =
        static_cast<const Scalar*>(args.x) + (static_cast<long long>(position) * C::kIn + in);
    const unsigned dy_to = own(first(stage)), x_to = own(second(stage));
#pragma unroll
    for (int row = 0; row < kChunk; row += kLoadRows) {
      const int from = row / kLoadRows * 4 + lane / 8;
      const Place its{__shfl_sync(0xFFFFFFFFu, mine.taps, from), __shfl_sync(0xFFFFFFFFu, mine.offset, from)};
#pragma unroll
      for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
        taps[consumer].copy(its, dy_to + consumer * kGroupBytes + row * kRowBytes);
      }
#pragma unroll
      for (int group = 0; group < C::kColumns / 64; ++group) {
        const bool inside =
            position + row < args.rows && (C::kIn % C::kColumns == 0 || in + group * 64 < C::kIn);
        ptx::copy_piece(x_to + group * kGroupBytes + row * kRowBytes,
                        x + (static_cast<long long>(row) * C::kIn + group * 64), inside);
      }
    }
  }

  __device__ __forceinline__ void produce(const Job& job) const {
    ptx::wait_for_previous_launch();
    if (job.input_grad) {
      produce(job, [&](int chunk, int stage) { copy_for_input_grad(job, chunk, stage); });
    } else {
      Tap taps[C::kConsumers];
#pragma unroll
      for (int i = 0; i < C::kConsumers; ++i) taps[i] = Tap(args, job.row + i * 64 + thread % 8 * kPiece);
      produce(job, [&](int chunk, int stage) { copy_for_weight_grad(job, taps, chunk, stage); });
    }
  }

  // Producers hand a chunk over when their copies are complete and visible to the tensor cores, while those
  // of the next kAhead chunks are in flight.
  template <class Copy>
  __device__ __forceinline__ void produce(const Job& job, Copy&& copy) const {
    Ring next, handed;
    int waiting = 0;  // chunks that are copied and not handed over
    for (int chunk = job.begin; chunk < job.end; ++chunk) {
      ptx::barrier_wait(empty(next.index), next.parity ^ 1u);
      copy(chunk, next.index);
      ptx::copy_commit();
      next.advance(C::kStages);
      if (++waiting > kAhead) {
        ptx::copy_wait<kAhead>();
        ptx::fence_async_proxy();
        ptx::barrier_arrive(full(handed.index));
        handed.advance(C::kStages);
        --waiting;
      }
    }
    ptx::copy_wait<0>();
    ptx::fence_async_proxy();
    for (; waiting > 0; --waiting) {
      ptx::barrier_arrive(full(handed.index));
      handed.advance(C::kStages);
    }
  }

  // ---- Consumers.

  // Adds 16 numbers of K to the sums of kCount columns from kFrom on. 64 columns of either second operand
  // take kGroupBytes.
  template <bool kInput, int kFrom, int kCount>
  static __device__ __forceinline__ void step(float* sums, unsigned long long a, unsigned long long b) {
    static_assert(kFrom % 64 == 0 && kCount % 64 == 0);
    using Multiply = ptx::MatrixMultiply<kCount>;
    if constexpr (kInput) {
      Multiply::template issue<kOperand>(sums + kFrom / 2, a, ptx::advance(b, kFrom * kRowBytes));
    } else {
      Multiply::template issue_rows<kOperand>(sums + kFrom / 2, a, ptx::advance(b, kFrom * kRowBytes));
    }
  }

  // Rows and columns outside the result are computed too, and their sums are never stored.
  template <bool kInput>
  __device__ __forceinline__ void consume(const Job& job) const {
    constexpr int kFirst = C::kColumns > 256 ? 192 : C::kColumns, kRest = C::kColumns - kFirst;
    constexpr int kStep = kInput ? 32 : 16 * kRowBytes;  // bytes of 16 numbers of K
    float sums[C::kColumns / 2];
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; ++i) {
      sums[i] = 0.0f;
      ptx::pin(sums[i]);
    }
    const int consumer = warp / 4 - 1;
    Ring stage;
    int before = -1;  // the stage whose products may still be running
#pragma unroll 1  // an unrolled loop would copy sums between products, and the compiler would serialize them
    for (int chunk = job.begin; chunk < job.end; ++chunk) {
      ptx::barrier_wait(full(stage.index), stage.parity);
      const unsigned rows = first(stage.index) + consumer * kGroupBytes, columns = second(stage.index);
      const auto a = ptx::matrix_descriptor<kRowBytes>(rows, 8 * kRowBytes);
      const auto b = kInput ? ptx::matrix_descriptor<kRowBytes>(columns, 8 * kRowBytes)
                            : ptx::matrix_descriptor_of_rows(columns, 8 * kRowBytes, kGroupBytes);
      ptx::matrix_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        step<kInput, 0, kFirst>(sums, ptx::advance(a, i * kStep), ptx::advance(b, i * kStep));
        if constexpr (kRest > 0) {
          step<kInput, kFirst, kRest>(sums, ptx::advance(a, i * kStep), ptx::advance(b, i * kStep));
        }
      }
      ptx::matrix_commit();
      ptx::matrix_wait<1>();
      release(before);
      before = stage.index;
      stage.advance(C::kStages);
    }
    ptx::matrix_wait<0>();
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; ++i) ptx::pin(sums[i]);
    if ((kInput ? args.portions_x : args.portions_w) > 1) {
      float* const parts = static_cast<float*>(kInput ? args.dx : args.dw);
      store<kInput>(job, sums, parts + job.portion * (kInput ? args.dx_pitch : args.dw_pitch));
    } else {
      store<kInput>(job, sums, static_cast<Scalar*>(kInput ? args.dx : args.dw));
    }
  }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (stage >= 0 && lane == 0) ptx::barrier_arrive(empty(stage));
  }

  // A lane has the sums of two rows, 8 rows apart, and of two neighbouring columns out of every 8.
  template <bool kInput, class T>
  __device__ __forceinline__ void store(const Job& job, const float (&sums)[C::kColumns / 2],
                                        T* result) const {
    const int first_row = job.row + (warp / 4 - 1) * 64 + warp % 4 * 16 + lane / 4;
    const int volume = static_cast<int>(args.by_volume.divisor);
    // Elements from one input channel to the next.
    const int step = !kInput ? kTerms : C::kLastX ? 1 : volume;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = first_row + 8 * k;
      if (row >= (kInput ? args.rows : kTerms)) break;
      int in = job.column + lane % 4 * 2;
      long long offset = row;
      if constexpr (kInput && C::kLastX) offset *= C::kIn;
      if constexpr (kInput && !C::kLastX) {
        const int item = divide(row, args.by_volume);
        offset += static_cast<long long>(item) * (C::kIn - 1) * volume;
      }
      T* to = result + (offset + static_cast<long long>(in) * step);
#pragma unroll
      for (int i = 0; i < C::kColumns / 8; ++i) {
        if (in >= C::kIn) break;
        const Vector<T, 2> both{
            {Narrow<T>::from(sums[4 * i + 2 * k]), Narrow<T>::from(sums[4 * i + 2 * k + 1])}};
        if constexpr (kInput && C::kLastX) {
          store_vector(to, both);
        } else {
          to[0] = both.at[0];
          to[step] = both.at[1];
        }
        in += 8;
        to += 8LL * step;
      }
    }
  }

  // ---- The bias gradient.

  // Adds up a share of the positions of dy: a thread has 8 channels of every kWalkers-th position. The sums
  // of all walkers are added in a fixed order.
  __device__ __forceinline__ void bias(int block) const {
    constexpr int kPieces = C::kOut / kPiece, kAtOnce = kPieces < C::kThreads ? kPieces : C::kThreads;
    constexpr int kWalkers = C::kThreads / kAtOnce, kPitch = (C::kOut + 3) / 4 * 4;
    const long long all = args.outputs;
    const int walker = thread / kAtOnce, begin = static_cast<int>(block * all / args.bias_blocks);
    const int end = static_cast<int>((block + 1) * all / args.bias_blocks);
    float* const sums = dynamic_shared<float>();
    ptx::wait_for_previous_launch();
    for (int piece = thread % kAtOnce; walker < kWalkers && piece < kPieces; piece += kAtOnce) {
      float own[kPiece] = {};
#pragma unroll 4
      for (int row = begin + walker; row < end; row += kWalkers) {
        const auto numbers = load_vector<kPiece>(static_cast<const Scalar*>(args.dy) +
                                                 (static_cast<long long>(row) * C::kOut + piece * kPiece));
#pragma unroll
        for (int e = 0; e < kPiece; ++e) own[e] += widen<float>(numbers.at[e]);
      }
#pragma unroll
      for (int e = 0; e < kPiece; ++e) sums[walker * C::kOut + piece * kPiece + e] = own[e];
    }
    __syncthreads();
    float* const part = static_cast<float*>(args.bias_parts) + static_cast<long long>(block) * kPitch;
    for (int channel = thread; channel < C::kOut; channel += C::kThreads) {
      float sum = 0.0f;
      for (int i = 0; i < kWalkers; ++i) sum += sums[i * C::kOut + channel];
      part[channel] = sum;
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  const GatheredProducts<C> products(args);
  const int block = static_cast<int>(blockIdx.x);
  if (block >= args.blocks_x + args.blocks_w) {
    ptx::launch_dependents();
    products.bias(block - args.blocks_x - args.blocks_w);
    return;
  }
  const auto job = products.job(block);
  products.prepare(job);
  if (products.warp < 4) {
    ptx::keep_registers<C::kProducerRegisters>();
    products.produce(job);
  } else {
    ptx::claim_registers<C::kConsumerRegisters>();
    if (job.input_grad) {
      products.template consume<true>(job);
    } else {
      products.template consume<false>(job);
    }
  }
}

}  // namespace tconv3d
