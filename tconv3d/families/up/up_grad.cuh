// One gradient of an up-convolution with many channels (kernel equal to stride, no padding, two taps along w)
// on Hopper's tensor cores (sm_90a; TF32). Every output belongs to one position q and one tap t:
//   dx[ci][q]      = sum over co, t of  w[ci][co][t] * dy[co][stride*q + t]
//   dw[ci][co][t]  = sum over q of      x[ci][q]     * dy[co][stride*q + t]
// Both are one GEMM of dy with an operand that has a column for each input channel. With many channels the
// time is that of the tensor cores, which is limited by how often operands pass through L2 and shared memory.
// A block therefore has as many columns as its registers can hold accumulators for.
//
// A row of dy is the elements of one (co, tap along d, tap along h): both taps along w of adjacent positions,
// contiguous as in memory. A piece is 16 bytes of a row, two positions. up_grad_pack.cuh has written the
// other operand in the order of shared memory, rounded.
//
//   producers   copy dy piece by piece with cp.async, and request the other operand by bulk copies
//   consumers   two warpgroups with different rows. dy reaches the tensor cores through registers: it keeps
//               its memory layout in shared memory, and is rounded when it is loaded
//
// For one instruction (64 rows of the product, 8 of K) lane (g, t) of a warp has one piece:
//   input grad    rows of the product are positions. The lane has piece g of row t: K is (row, tap)
//   weight grad   rows of the product are (row, tap). The lane has piece t of row g: K is positions
// In both products K is first the even-numbered words of every 8 and then the odd-numbered ones, so the other
// operand is stored in this order.
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

// What both gradients agree on.
template <class C>
struct UpGradShape {
  // A chunk has kRowBytes bytes of K of every column, in kSteps steps.
  static constexpr int kRowBytes = 64, kStepBytes = 32, kSteps = kRowBytes / kStepBytes;
  static constexpr int kChunkPieces = kRowBytes / 8;  // pieces per chunk of K
  static constexpr int kPlanes = C::kKernelD * C::kKernelH, kRowsAll = C::kOut * kPlanes;
  // An instruction computes half of the columns: with one instruction for all of them the compiler serializes
  // the products.
  static constexpr int kUnits = 2, kUnitColumns = C::kColumns / kUnits;
  static constexpr int kSums = kUnitColumns / 2;
  static constexpr int kInTiles = (C::kIn + C::kColumns - 1) / C::kColumns;
  static constexpr int kSide = 64;  // pieces (dx) or rows of dy (dw) of a tile, for both consumers together
  static constexpr int kProducers = 128;

  static_assert(C::kColumns % (8 * kUnits) == 0 && C::kKernelW == 2);

  struct Sums {
    float at[kUnits][kSums];
    float bias;
  };
  struct Place {
    long long dy, dx;
    bool inside;
  };

  const Args& args;
  int warp, lane;
  int first_in, which;  // which: index among the blocks with the same columns

  __device__ __forceinline__ UpGradShape(const Args& args, int warp, int lane)
      : args(args),
        warp(warp),
        lane(lane),
        first_in(static_cast<int>(blockIdx.x) % kInTiles * C::kColumns),
        which(static_cast<int>(blockIdx.x) / kInTiles) {}

  // Offset of a row of dy from a position's first output, in elements.
  __device__ __forceinline__ long long row_begin(int row) const {
    const int plane = row % kPlanes;
    return row / kPlanes * args.dy_strides.c + plane / C::kKernelH * args.dy_strides.d +
           plane % C::kKernelH * args.dy_strides.h;
  }
  __device__ __forceinline__ Place find(int piece) const {
    const bool inside = piece < args.pieces;
    if (!inside) piece = 0;
    const int line = divide(piece, args.by_w), sheet = divide(line, args.by_h), n = divide(sheet, args.by_d);
    const long long d = sheet - n * static_cast<int>(args.by_d.divisor);
    const long long h = line - sheet * static_cast<int>(args.by_h.divisor);
    const int w = piece - line * static_cast<int>(args.by_w.divisor);
    const Strides &dy = args.dy_strides, &dx = args.dx_strides;
    return Place{n * dy.n + d * C::kKernelD * dy.d + h * C::kKernelH * dy.h + 4 * w,
                 n * dx.n + d * dx.d + h * dx.h + 2 * w, inside};
  }
  // Row of dy (dw) or piece (dx) of a tile that a consumer's lane has.
  __device__ __forceinline__ int own() const { return (warp - kProducers / 32) * 8 + lane / 4; }
  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return OperandOf<float>::bits(ptx::bits_to_float(word));
  }
  // Calls store(input channel, both accumulators) for every column of a lane.
  template <class Store>
  static __device__ __forceinline__ void for_columns(const float (&sums)[kUnits][kSums], int first,
                                                     const Store& store) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        const int at = i / 2 * 4 + i % 2;
        const int in = first + unit * kUnitColumns + i / 2 * 8 + i % 2;
        if (C::kIn % C::kColumns != 0 && in >= C::kIn) continue;
        store(in, Vector<float, 2>{sums[unit][at], sums[unit][at + 2]});
      }
    }
  }
};

// The input gradient. A stage holds some rows of dy with all pieces of a tile. A work item is a tile.
template <class C>
struct UpInputGrad : UpGradShape<C> {
  using Shape = UpGradShape<C>;
  using Shape::args, Shape::warp, Shape::lane, Shape::first_in, Shape::which;
  using Shape::kPlanes, Shape::kProducers, Shape::kRowsAll;
  using typename Shape::Sums;

  static constexpr int kRows = Shape::kChunkPieces, kPieces = Shape::kSide;
  static constexpr int kPitch = 4 * kPieces + 8;  // words; operand loads have no bank conflicts
  static constexpr int kRowsAtOnce = kProducers / kPieces;

  __device__ __forceinline__ UpInputGrad(const Args& args, int warp, int lane) : Shape(args, warp, lane) {}

  __device__ __forceinline__ int items() const {
    return (args.tiles - which + args.sharers - 1) / args.sharers;
  }
  __device__ __forceinline__ int tile_of(int item) const { return which + item * args.sharers; }
  __device__ __forceinline__ int first_chunk() const { return 0; }
  __device__ __forceinline__ int chunks_in_all() const { return args.chunks; }

  // The piece of a tile that a producer thread copies.
  struct Source {
    const float* from;
    bool inside;
  };
  __device__ __forceinline__ Source source(int item) const {
    const auto place = Shape::find(tile_of(item) * kPieces + static_cast<int>(threadIdx.x) % kPieces);
    return Source{static_cast<const float*>(args.dy) + place.dy, place.inside};
  }
  __device__ __forceinline__ void copy(unsigned* stage, const Source& source, int chunk) const {
    const int first = static_cast<int>(threadIdx.x) / kPieces;
    unsigned* const to = stage + first * kPitch + static_cast<int>(threadIdx.x) % kPieces * 4;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      const int local = first + i * kRowsAtOnce, row = chunk * kRows + local;
      const bool there = source.inside && (kRowsAll % (2 * kRows) == 0 || row < kRowsAll);
      long long begin;
      if constexpr (kRows % kPlanes == 0) {
        begin = chunk * (kRows / kPlanes) * args.dy_strides.c + Shape::row_begin(local);
      } else {
        begin = Shape::row_begin(row);
      }
      ptx::copy_words_once<4>(to + i * kRowsAtOnce * kPitch, source.from + (there ? begin : 0), there);
    }
  }

  __device__ __forceinline__ void load(unsigned (&to)[4], Sums&, const unsigned* stage, int step) const {
    const auto words = load_vector<4>(stage + (step * 4 + lane % 4) * kPitch + Shape::own() * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = Shape::rounded(words.at[i % 2 * 2 + i / 2]);
  }

  __device__ __forceinline__ void store(const Sums& sums, int item) const {
    const auto place = Shape::find(tile_of(item) * kPieces + Shape::own());
    if (!place.inside) return;
    float* const to = static_cast<float*>(args.result) + place.dx;
    Shape::for_columns(sums.at, first_in + lane % 4 * 2, [&](int in, const Vector<float, 2>& both) {
      store_vector(to + in * args.dx_strides.c, both);
    });
  }
};

// The weight gradient. A stage holds some pieces of all rows of a tile. A block has one work item: a tile and
// a part of K.
template <class C>
struct UpWeightGrad : UpGradShape<C> {
  using Shape = UpGradShape<C>;
  using Shape::args, Shape::warp, Shape::lane, Shape::first_in, Shape::which;
  using Shape::kPlanes, Shape::kProducers, Shape::kRowsAll;
  using typename Shape::Sums;

  static constexpr int kRows = Shape::kSide, kPieces = Shape::kChunkPieces;
  static constexpr int kPitch = 4 * kPieces + 16;
  static constexpr int kRowsAtOnce = kProducers / kPieces;

  int first_row, part;

  __device__ __forceinline__ UpWeightGrad(const Args& args, int warp, int lane) : Shape(args, warp, lane) {
    part = which / args.tiles;
    first_row = which % args.tiles * kRows;
  }

  __device__ __forceinline__ int items() const { return 1; }
  __device__ __forceinline__ int first_chunk() const { return part * args.chunks; }
  __device__ __forceinline__ int chunks_in_all() const { return args.chunks * args.sharers; }

  // First row of dy that a producer thread copies.
  using Source = int;
  __device__ __forceinline__ Source source(int) const {
    return first_row + static_cast<int>(threadIdx.x) / kPieces;
  }
  __device__ __forceinline__ void copy(unsigned* stage, const Source& first, int chunk) const {
    const int piece = static_cast<int>(threadIdx.x) % kPieces;
    const auto place = Shape::find(chunk * kPieces + piece);
    unsigned* const to = stage + static_cast<int>(threadIdx.x) / kPieces * kPitch + piece * 4;
    const float* const from = static_cast<const float*>(args.dy) + place.dy;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      const int row = first + i * kRowsAtOnce;
      const bool there = place.inside && row < kRowsAll;
      ptx::copy_words_once<4>(to + i * kRowsAtOnce * kPitch, from + (there ? Shape::row_begin(row) : 0),
                              there);
    }
  }

  __device__ __forceinline__ void load(unsigned (&to)[4], Sums& sums, const unsigned* stage, int step) const {
    const auto words = load_vector<4>(stage + Shape::own() * kPitch + (step * 4 + lane % 4) * 4);
    float both[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      both[i] = ptx::bits_to_float(words.at[2 * i]) + ptx::bits_to_float(words.at[2 * i + 1]);
    }
    if constexpr (C::kBias) sums.bias += both[0] + both[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = Shape::rounded(words.at[i]);
  }

  __device__ __forceinline__ void store(const Sums& sums, int) const {
    const int row = first_row + Shape::own();
    if constexpr (C::kBias) store_bias(sums.bias, row);
    if (row >= kRowsAll) return;
    float* const to = static_cast<float*>(args.result) + part * args.dw_pitch + 2 * row;
    Shape::for_columns(sums.at, first_in + lane % 4 * 2, [&](int in, const Vector<float, 2>& both) {
      store_vector(to + in * (2ll * kRowsAll), both);
    });
  }
  __device__ __forceinline__ void store_bias(float sum, int row) const {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (row >= kRowsAll || first_in != 0 || lane % 4 != 0) return;
    static_cast<float*>(args.bias_parts)[(part * kPlanes + row % kPlanes) * args.db_pitch + row / kPlanes] =
        sum;
  }
};

template <class C>
struct UpGrad {
  using Layout = typename Choose<C::kWeightGrad, UpWeightGrad<C>, UpInputGrad<C>>::type;
  using Sums = typename Layout::Sums;

  static constexpr int kSteps = Layout::kSteps, kUnits = Layout::kUnits;
  // A panel is the packed operand of one chunk of K.
  static constexpr int kPanelBytes = C::kColumns * Layout::kRowBytes;
  static constexpr int kStageWords = Layout::kRows * Layout::kPitch;
  static constexpr int kConsumers = 2;

  static_assert(C::kThreads == Layout::kProducers + 128 * kConsumers && C::kStages >= 3);

  const Args& args;
  int warp, lane;
  Layout layout;
  unsigned char* panels;
  unsigned* stages;
  unsigned barriers;

  __device__ __forceinline__ UpGrad(const Args& arguments)
      : args(arguments),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32),
        layout(arguments, warp, lane) {
    panels = dynamic_shared<unsigned char>();
    stages = reinterpret_cast<unsigned*>(panels + C::kStages * kPanelBytes);
    barriers = ptx::shared_address(stages + C::kStages * kStageWords);
  }

  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 8 * (C::kStages + stage); }

  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(full(i), Layout::kProducers + 1);
        ptx::barrier_init(empty(i), 128 * kConsumers);
      }
      ptx::fence_barrier_init();
    }
    __syncthreads();
    ptx::wait_for_previous_launch();
  }

  __device__ __forceinline__ void request(const unsigned char* panel, int stage) const {
    ptx::barrier_arrive_expect(full(stage), kPanelBytes);
    ptx::bulk_copy(ptx::shared_address(panels) + stage * kPanelBytes, panel, kPanelBytes, full(stage));
  }

  __device__ __forceinline__ void produce() const {
    const unsigned char* const packed =
        static_cast<const unsigned char*>(args.packed) +
        static_cast<long long>(layout.first_in / C::kColumns) * layout.chunks_in_all() * kPanelBytes;
    Ring stage;
#pragma unroll 1
    for (int item = 0; item < layout.items(); ++item) {
      const auto source = layout.source(item);
#pragma unroll 1
      for (int i = 0; i < args.chunks; ++i) {
        const int chunk = layout.first_chunk() + i;
        ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
        if (threadIdx.x == 0) request(packed + static_cast<long long>(chunk) * kPanelBytes, stage.index);
        layout.copy(stages + stage.index * kStageWords, source, chunk);
        ptx::copy_arrive(full(stage.index));
        stage.advance(C::kStages);
      }
    }
  }

  // ---- Consumers.

  // Frees a stage whose products are done.
  __device__ __forceinline__ void release(Ring& stage) const {
    ptx::barrier_arrive(empty(stage.index));
    stage.advance(C::kStages);
  }

  using Operands = unsigned[kSteps][4];

  static __device__ __forceinline__ void pin(Operands& operands) {
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) ptx::pin(operands[i / 4][i % 4]);
  }

  __device__ __forceinline__ void multiply(Sums& sums, Operands& operands, const Ring& stage) const {
    const unsigned* const from = stages + stage.index * kStageWords;
    static_for<kSteps>([&](auto step) { layout.load(operands[step], sums, from, step); });
    pin(operands);  // complete before the first product
    const unsigned long long b = ptx::matrix_descriptor<Layout::kRowBytes>(
        ptx::shared_address(panels) + stage.index * kPanelBytes, 8 * Layout::kRowBytes);
    ptx::matrix_fence();
    static_for<kSteps * kUnits>([&](auto i) {
      constexpr int kUnit = decltype(i)::value % kUnits, kStep = decltype(i)::value / kUnits;
      ptx::MatrixMultiply<Layout::kUnitColumns>::template issue<ptx::Operand::kTf32>(
          sums.at[kUnit], operands[kStep],
          ptx::advance(b, kUnit * Layout::kUnitColumns * Layout::kRowBytes + kStep * Layout::kStepBytes));
    });
    ptx::matrix_commit();
  }

  static constexpr int kAll = kUnits * Layout::kSums;
  static __device__ __forceinline__ float& sum_of(Sums& sums, int i) {
    return sums.at[i / Layout::kSums][i % Layout::kSums];
  }

  __device__ __forceinline__ void consume() const {
    Sums sums;
    Operands operands[2] = {};
    Ring stage, done;
#pragma unroll 1
    for (int item = 0; item < layout.items(); ++item) {
#pragma unroll
      for (int i = 0; i < kAll; ++i) {
        sum_of(sums, i) = 0.0f;
        ptx::pin(sum_of(sums, i));
      }
      sums.bias = 0.0f;
#pragma unroll 1
      for (int chunk = 0; chunk < args.chunks; chunk += 2) {
        static_for<2>([&](auto set) {
          ptx::barrier_wait(full(stage.index), stage.parity);
          ptx::matrix_wait<1>();  // only the latest chunk's products may be in flight
          pin(operands[set]);     // the registers are not reused before this point
          multiply(sums, operands[set], stage);
          if (chunk > 0) release(done);
          stage.advance(C::kStages);
        });
      }
      ptx::matrix_wait<0>();
      pin(operands[0]);
      pin(operands[1]);
#pragma unroll
      for (int i = 0; i < kAll; ++i) ptx::pin(sum_of(sums, i));
      release(done);
      release(done);
      layout.store(sums, item);
      __syncwarp();
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  UpGrad<Config> kernel(args);
  kernel.prepare();
  if (kernel.warp < 4) {
    ptx::keep_registers<Config::kProducerRegisters>();
    kernel.produce();
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    kernel.consume();
  }
}

}  // namespace tconv3d
