// Forward pass of layers with few output channels, on tensor cores: products first, shifts afterwards.
//
// With one output channel, a matrix product over input channels has one column and leaves tensor cores idle.
// The product of x with the weights of all taps at once has a column for every tap:
//
//   c[position][tap, co]             = sum over ci of  x[position][ci] * w[ci][co][tap]
//   y[stride*q + phase][co]          = bias + sum over the phase's taps of  c[q - shift(tap)][tap, co]
//
// A block owns a tile of kTileH x kTileW positions q and walks along depth. Input plane i feeds output planes
// i*stride - padding + tap*dilation, a window of kWindow planes. The columns of c are (plane of the window,
// tap within the plane, co), and the accumulators hold the whole window, so that the matrix instruction
// itself sums the contributions of successive input planes. After every input plane the first `stride`
// planes of the window are complete. Their columns go to shared memory as [column][position], each thread
// adds up the taps of its positions and stores the sums, and the window moves on by `stride` planes.
//
// A warp has kRowTiles * 16 rows of the product, neighbours in the tile's lines. It copies these rows itself,
// in chunks of channels, into a ring of its own, and prefetches kStages - 1 chunks, across planes. The block
// therefore synchronizes only where columns pass through shared memory, twice per plane. Each warp gathers
// and stores its share of the outputs between chunks of the next plane. Warps do so at different times,
// so that some store while others multiply.
//
// Strict float32 (kHalves == 2) computes every product as three TF32 products of split values (`Halves`); x
// and the weights are split when they are loaded. Tensor cores round sums towards zero, so the products of
// one step are summed on their own, the small ones first, and are added to the window by additions that round
// to nearest.
#pragma once

#include "epilogue.cuh"
#include "operands.cuh"
#include "over_channels.cuh"

namespace tconv3d {

template <class C>
struct FewOutputs {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;
  using Operand = OperandOf<Scalar>;

  static constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  static constexpr int kPhases = C::kStrideH * C::kStrideW;
  static constexpr int kPlaneTaps = C::kKernelH * C::kKernelW;
  static constexpr int kPlaneColumns = kPlaneTaps * C::kOut;  // columns of one output plane
  static constexpr int kPositions = C::kTileH * C::kTileW;
  static constexpr int kWarpRows = C::kRowTiles * 16;
  static constexpr int kRows = kWarps * kWarpRows;

  // The window's columns form groups of `stride` planes, and every input plane completes the first group.
  static constexpr int kGroupColumns = C::kStrideD * kPlaneColumns;
  static constexpr int kGroupTiles = (kGroupColumns + 7) / 8;
  static constexpr int kGroups = (C::kWindow + C::kStrideD - 1) / C::kStrideD;
  static constexpr int kRestPlanes = C::kWindow - (kGroups - 1) * C::kStrideD;
  static constexpr int kTiles = (kGroups - 1) * kGroupTiles + (kRestPlanes * kPlaneColumns + 7) / 8;

  static constexpr int kItemBytes = static_cast<int>(sizeof(Scalar));
  static constexpr int kWordItems = 4 / kItemBytes;   // operands per 32-bit register
  static constexpr int kStepItems = 32 / kItemBytes;  // input channels of one mma instruction
  static constexpr int kChunkSteps = C::kChunk / kStepItems;
  static constexpr int kChunks = (C::kIn + C::kChunk - 1) / C::kChunk;
  static constexpr int kSteps = kChunks * kChunkSteps;
  static constexpr int kPairWords = 2 * C::kHalves;  // 32-bit words of weights per lane and instruction

  // A stage of a warp's ring is [channel][row], or [row][channel] for channels-last tensors. One copy moves
  // kVector elements; if C::kVector is 0, elements pass through registers one by one.
  static constexpr int kVector = C::kVector > 0 ? C::kVector : 1;
  static constexpr int kCopies = C::kChunk * kWarpRows / kVector / kLanes;
  static constexpr int kStageItems = (C::kChannelsLast ? kWarpRows : C::kChunk) * C::kItemPitch;
  // Fragments of kStepsAtOnce K steps are loaded together, and a lane then holds kLaneWords words of a row.
  static constexpr int kStepsAtOnce = C::kChannelsLast ? 1 : kChunkSteps;
  static constexpr int kLaneWords = 2 * kStepsAtOnce;
  // Channels-last, a fragment load reads 32 bytes from each of four neighbouring rows, which must lie in
  // different banks. Where a row has two K steps, the last two of every four rows therefore have their
  // 32-byte halves exchanged.
  static __device__ __forceinline__ int swizzle(int row) {
    return kChunkSteps == 2 ? row / 2 % 2 * kStepItems : 0;
  }
  static_assert(kChunkSteps == 1 || kChunkSteps == 2, "swizzled rows");

  // A column in shared memory consists of lines of C::kLine positions, with C::kGap zeros before the first
  // line, between lines and behind the last line.
  static constexpr int kColumnLine = C::kLine + C::kGap;

  // The block's threads gather the outputs of the completed planes in kRounds rounds.
  static constexpr int kRounds = (C::kStrideD * kPositions + C::kThreads - 1) / C::kThreads;

  // A lane computes the addresses of its copies once if it has at most 8 per chunk, else for every chunk,
  // which saves registers.
  static constexpr int kKeptCopies = kCopies <= 8 ? kCopies : 0;
  struct Copy {
    Index from;  // offset within a chunk of a plane of x; -1: write zeros
    int to;      // index in a stage
  };

  static_assert(C::kThreads % kLanes == 0, "whole warps");
  static_assert(kRows >= C::kHaloH * C::kLine, "the warps' rows cover the halo");
  static_assert(C::kPitch >= C::kGap + (kRows + C::kLine - 1) / C::kLine * kColumnLine && C::kPitch % 32 == 4,
                "columns of c: room for all rows, and stores of fragments without bank conflicts");
  static_assert(C::kChunk % kStepItems == 0 && C::kChunk % kVector == 0, "whole steps and vectors");
  static_assert(C::kChannelsLast || (C::kLine % kVector == 0 && C::kItemPitch % 16 == 8),
                "vectors within a line; loads of fragments without bank conflicts");
  static_assert(!C::kChannelsLast || C::kItemPitch == C::kChunk, "fragments are loaded in vectors");
  static_assert(C::kChannelsLast || C::kItemPitch >= kWarpRows, "a stage has room for the rows");
  static_assert(kLaneWords == 2 || kLaneWords == 4, "a vector of words");
  static_assert(C::kVector == 0 || kVector * kItemBytes % 4 == 0, "copies move words");
  static_assert(!C::kChannelsLast || C::kIn % kVector == 0, "a vector has channels of one group");
  static_assert(C::kStages >= 2);

  const Args& args;
  unsigned* weights;  // shared memory, [step][column tile][lane][half][2], in fragment order
  float* columns;     // shared memory, [column][kPitch]
  Scalar* ring;       // shared memory of this warp, [kStages][kStageItems]
  const Scalar* x;    // first input plane of the block
  int n, group, tile_h, tile_w, first_output, last_output, first_plane;
  int lane, warp;
  Copy kept[kKeptCopies > 0 ? kKeptCopies : 1];
  int copy_stage, copy_chunk, copy_plane;  // stage, chunk and plane of the next copy
  float sum[C::kRowTiles][kTiles][4];

  __device__ __forceinline__ void locate() {
    lane = threadIdx.x % kLanes;
    warp = threadIdx.x / kLanes;
    int rest = blockIdx.x;
    int next = divide(rest, args.tiles_w);
    tile_w = (rest - next * static_cast<int>(args.tiles_w.divisor)) * C::kTileW;
    rest = next;
    next = divide(rest, args.tiles_h);
    tile_h = (rest - next * static_cast<int>(args.tiles_h.divisor)) * C::kTileH;
    rest = next;
    next = divide(rest, args.parts);
    first_output = (rest - next * static_cast<int>(args.parts.divisor)) * args.planes;
    last_output = args.y_size.d - first_output < args.planes ? args.y_size.d : first_output + args.planes;
    n = next % args.batch;
    group = next / args.batch;
    // Output plane d sums input planes i with i*stride - padding <= d <= i*stride - padding +
    // dilation*(kernel - 1). It is stored after the last plane i with i*stride - padding <= d, even if no tap
    // leads from i to d.
    const int reach = first_output + C::kPaddingD - C::kDilationD * (C::kKernelD - 1);
    const int storing = (first_output + C::kPaddingD) / C::kStrideD;
    const int feeding = reach > 0 ? (reach + C::kStrideD - 1) / C::kStrideD : 0;
    first_plane = feeding < storing ? feeding : storing;
    x = static_cast<const Scalar*>(args.x) + n * args.x_strides.n +
        static_cast<long long>(group) * C::kIn * args.x_strides.c + first_plane * args.x_strides.d;
  }

  // ---- The ring of copied chunks.

  // A row of a stage consists of kAcross vectors.
  static constexpr int kAcross = (C::kChannelsLast ? C::kChunk : kWarpRows) / kVector;

  // The channel (within the chunk) and the row (within the warp's rows) of this lane's i-th vector.
  // Channels-last, one copy by all lanes moves whole rows, and a lane has one channel for all i.
  __device__ __forceinline__ int copy_channel(int i) const {
    return C::kChannelsLast ? lane % kAcross * kVector : (lane + i * kLanes) / kAcross;
  }
  __device__ __forceinline__ int copy_row(int i) const {
    return C::kChannelsLast ? lane / kAcross + i * (kLanes / kAcross)
                            : (lane + i * kLanes) % kAcross * kVector;
  }
  static_assert(!C::kChannelsLast || kLanes % kAcross == 0, "whole rows");

  __device__ __forceinline__ int copy_to(int i) const {
    if constexpr (!C::kChannelsLast) return copy_channel(i) * C::kItemPitch + copy_row(i);
    // Rows that are a multiple of four apart have one swizzle, so that the offset of the first copy serves
    // all.
    constexpr bool kAlike = kChunkSteps == 1 || kLanes / kAcross % 4 == 0;
    const int own = copy_row(0) * C::kItemPitch + (copy_channel(0) ^ swizzle(copy_row(kAlike ? 0 : i)));
    return own + i * (kLanes / kAcross) * C::kItemPitch;
  }
  __device__ __forceinline__ Copy copy_of(int i) const {
    const int row = warp * kWarpRows + copy_row(i);
    const int x_h = tile_h + C::kOriginH + row / C::kLine, x_w = tile_w + C::kOriginW + row % C::kLine;
    const bool inside =
        row < C::kHaloH * C::kLine && x_h >= 0 && x_h < args.x_size.h && x_w >= 0 && x_w < args.x_size.w;
    TCONV3D_ASSUME(!inside || C::kChannelsLast || x_w + kVector <= args.x_size.w);
    const Index offset = copy_channel(i) * static_cast<Index>(args.x_strides.c) +
                         x_h * static_cast<Index>(args.x_strides.h) +
                         x_w * static_cast<Index>(args.x_strides.w);
    return Copy{inside ? offset : Index(-1), copy_to(i)};
  }

  __device__ __forceinline__ void start_ring() {
    copy_stage = copy_chunk = copy_plane = 0;
#pragma unroll
    for (int i = 0; i < kKeptCopies; ++i) kept[i] = copy_of(i);
  }

  // Copies the next chunk, if there is one. Every call commits exactly one group of asynchronous copies.
  __device__ __forceinline__ void copy_next() {
    if (first_plane + copy_plane < args.x_size.d) {
      const Scalar* chunk = x + copy_plane * args.x_strides.d +
                            copy_chunk * static_cast<long long>(C::kChunk) * args.x_strides.c;
      Scalar* stage = ring + copy_stage * kStageItems;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool exists = C::kIn % C::kChunk == 0 || copy_channel(i) < C::kIn - copy_chunk * C::kChunk;
        const Copy copy = kKeptCopies > 0 ? kept[kKeptCopies > 0 ? i : 0] : copy_of(i);
        const bool inside = copy.from >= 0 && exists;
        const Scalar* address = chunk + (inside ? copy.from : Index(0));
        // Channels-last, the target index is cheaper to recompute than to hold in a register.
        Scalar* const to = stage + (C::kChannelsLast ? copy_to(i) : copy.to);
        if constexpr (C::kVector > 0) {
          ptx::copy_words_of_line<kVector * kItemBytes / 4>(to, address, inside);
        } else {
          *to = inside ? load_constant(address) : Scalar{};
        }
      }
    }
    ptx::copy_commit();
    copy_stage = copy_stage + 1 < C::kStages ? copy_stage + 1 : 0;
    if (++copy_chunk == kChunks) {
      copy_chunk = 0;
      ++copy_plane;
    }
  }

  // ---- The products.

  // Returns the first channel that this lane holds of a step's fragments, in the first or second part along
  // K. K may be permuted as long as x and the weights agree, so that channels-last a lane's words are
  // neighbours in memory.
  __device__ __forceinline__ int channel_of(int step, int part) const {
    const int word = C::kChannelsLast ? lane % 4 * kLaneWords + step % kStepsAtOnce * 2 + part
                                      : step % kStepsAtOnce * 8 + lane % 4 + 4 * part;
    return (step / kStepsAtOnce * (8 * kStepsAtOnce) + word) * kWordItems;
  }

  // Returns the tap along depth that feeds a plane of the window, or -1 if none does.
  static __device__ __forceinline__ int depth_tap(int plane) {
    return plane % C::kDilationD == 0 && plane / C::kDilationD < C::kKernelD ? plane / C::kDilationD : -1;
  }

  __device__ __forceinline__ void stage_weights() {
    const Scalar* w =
        static_cast<const Scalar*>(args.w) + static_cast<long long>(group) * C::kIn * args.w_strides.n;
#pragma unroll 4  // keeps four iterations' loads in flight
    for (int i = warp; i < kSteps * kTiles; i += kWarps) {
      const int step = i / kTiles, tile = i % kTiles;
      const int column = tile % kGroupTiles * 8 + lane / 4;
      const int plane = tile / kGroupTiles * C::kStrideD + column / kPlaneColumns;
      const int tap = column % kPlaneColumns / C::kOut, co = column % C::kOut;
      const int tap_d = depth_tap(plane);
      const bool exists = column < kGroupColumns && plane < C::kWindow && tap_d >= 0;
      const long long offset = co * args.w_strides.c + tap_d * args.w_strides.d +
                               tap / C::kKernelW * args.w_strides.h + tap % C::kKernelW * args.w_strides.w;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        unsigned bits[C::kHalves] = {};
#pragma unroll
        for (int k = 0; k < kWordItems; ++k) {
          const int channel = channel_of(step, part) + k;
          if (exists && channel < C::kIn) {
#pragma unroll
            for (int half = 0; half < C::kHalves; ++half) {
              bits[half] |= operand(load_constant(w + offset + channel * args.w_strides.n), half) << (16 * k);
            }
          }
        }
#pragma unroll
        for (int half = 0; half < C::kHalves; ++half) {
          weights[(i * kLanes + lane) * kPairWords + half * 2 + part] = bits[half];
        }
      }
    }
  }

  // Returns the operand bits of a value or, in strict float32, of its high (0) or low (1) half.
  static __device__ __forceinline__ unsigned operand(Scalar value, int half) {
    if constexpr (C::kHalves == 2) {
      return half == 0 ? Halves::high(value) : Halves::low(value);
    } else {
      return Operand::bits(value);
    }
  }

  // Loads the words of this lane's fragments, [step][part along K], from row first_row + lane/4 of a stage,
  // beginning with K step first_step. Channels-last, rows that are a multiple of 8 apart have one swizzle. In
  // strict float32 the words are the unsplit values.
  __device__ __forceinline__ void load_row(const Scalar* stage, int first_row, int first_step,
                                           unsigned (&words)[kLaneWords]) const {
    const int row = first_row + lane / 4;
    if constexpr (C::kChannelsLast) {
      const int own = lane / 4 * C::kItemPitch + (first_step * kStepItems ^ swizzle(lane / 4));
      const auto found =
          load_vector<kLaneWords>(reinterpret_cast<const unsigned*>(stage + own) + lane % 4 * kLaneWords +
                                  first_row * C::kItemPitch / kWordItems);
#pragma unroll
      for (int i = 0; i < kLaneWords; ++i) {
        words[i] = found.at[i];
        if constexpr (kWordItems == 1 && C::kHalves == 1) {
          words[i] = Operand::bits(ptx::bits_to_float(words[i]));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneWords; ++i) {
        const Scalar* at = stage + channel_of(i / 2, i % 2) * C::kItemPitch + row;
        if constexpr (C::kHalves == 2) {
          words[i] = ptx::float_to_bits(at[0]);
        } else {
          words[i] = Operand::bits(at[0]);
        }
        if constexpr (kWordItems == 2) words[i] |= Operand::bits(at[C::kItemPitch]) << 16;
      }
    }
  }

  // Adds the products of one chunk of channels to the window.
  __device__ __forceinline__ void multiply(const Scalar* stage, int chunk) {
    const unsigned* chunk_weights = weights + chunk * (kChunkSteps * kTiles * kLanes * kPairWords);
#pragma unroll
    for (int first = 0; first < kChunkSteps; first += kStepsAtOnce) {
      unsigned words[C::kRowTiles][2][kLaneWords];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          load_row(stage, m * 16 + half * 8, first, words[m][half]);
        }
      }
#pragma unroll
      for (int step = 0; step < kStepsAtOnce; ++step) {
        unsigned a[C::kHalves][C::kRowTiles][4];
#pragma unroll
        for (int i = 0; i < C::kRowTiles * 4; ++i) {
          const unsigned word = words[i / 4][i % 2][step * 2 + i % 4 / 2];
          if constexpr (C::kHalves == 2) {
            a[0][i / 4][i % 4] = Halves::high(ptx::bits_to_float(word));
            a[1][i / 4][i % 4] = Halves::low(ptx::bits_to_float(word));
          } else {
            a[0][i / 4][i % 4] = word;
          }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const auto b = load_vector<kPairWords>(
              chunk_weights + (((first + step) * kTiles + tile) * kLanes + lane) * kPairWords);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            if constexpr (C::kHalves == 2) {
              multiply_halves(sum[m][tile], a[0][m], a[1][m], b);
            } else {
              ptx::warp_multiply<Operand::kOperand>(sum[m][tile], a[0][m], b.at);
            }
          }
        }
      }
    }
  }

  // Adds the product of strict float32 values as three TF32 products, the small ones first.
  static __device__ __forceinline__ void multiply_halves(float (&total)[4], const unsigned (&high)[4],
                                                         const unsigned (&low)[4],
                                                         const Vector<unsigned, 4>& b) {
    const unsigned b_high[2] = {b.at[0], b.at[1]}, b_low[2] = {b.at[2], b.at[3]};
    float part[4] = {};
    ptx::warp_multiply<Operand::kOperand>(part, low, b_high);
    ptx::warp_multiply<Operand::kOperand>(part, high, b_low);
    ptx::warp_multiply<Operand::kOperand>(part, high, b_high);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += part[i];
  }

  // Returns where this lane's row of half `half` of the warp's m-th tile of 16 rows lies in a column.
  __device__ __forceinline__ int place_of(int m, int half) const {
    const int row = warp * kWarpRows + m * 16 + half * 8 + lane / 4;
    return C::kGap > 0 ? row + (row / C::kLine + 1) * C::kGap : row;
  }

  __device__ __forceinline__ void clear_columns() {
    for (int i = threadIdx.x; i < kGroupTiles * 8 * C::kPitch; i += C::kThreads) columns[i] = 0.0f;
  }

  // Writes the columns of the completed planes to shared memory and moves the window on by `stride` planes.
  __device__ __forceinline__ void exchange() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = tile * 8 + lane % 4 * 2 + i % 2;
          if (tile < kGroupTiles) columns[column * C::kPitch + place_of(m, i / 2)] = sum[m][tile][i];
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          constexpr int kKept = kTiles - kGroupTiles;
          sum[m][tile][i] = tile < kKept ? sum[m][tile < kKept ? tile + kGroupTiles : 0][i] : 0.0f;
        }
      }
    }
  }

  // ---- The outputs.

  // Sums the taps of one position of one completed plane, for all phases within the plane, and stores the
  // outputs.
  __device__ __forceinline__ void gather(int item, int plane) {
    const int j = item / kPositions, position = item % kPositions;
    const int qh = position / C::kTileW, qw = position % C::kTileW;
    const int d = plane * C::kStrideD - C::kPaddingD + j;
    if (j >= C::kStrideD || d < first_output || d >= last_output) return;
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
    float total[kPhases][C::kOut];
#pragma unroll
    for (int co = 0; co < C::kOut; ++co) {
      const float start = bias == nullptr ? 0.0f : widen<float>(load_constant(bias + group * C::kOut + co));
#pragma unroll
      for (int f = 0; f < kPhases; ++f) total[f][co] = start;
    }
    const float* own = columns + j * (kPlaneColumns * C::kPitch) + qh * kColumnLine + C::kGap + qw;
    static_for<kPlaneTaps>([&](auto i) {
      constexpr int kPhase = C::kTapPhase(i), kOffset = C::kTapOffset(i);
#pragma unroll
      for (int co = 0; co < C::kOut; ++co) total[kPhase][co] += own[(i * C::kOut + co) * C::kPitch + kOffset];
    });
    store(total, d, (tile_h + qh) * C::kStrideH, (tile_w + qw) * C::kStrideW);
  }

  // A store writes kJoined neighbouring outputs: one output, all phases along w of a channel, or,
  // channels-last, all phases along w and channels of a position.
  static constexpr bool kPoints = C::kJoined > C::kStrideW || C::kOut == 1;
  static constexpr int kRuns = C::kStrideW * C::kOut / C::kJoined;
  static_assert(C::kJoined == 1 || C::kJoined == C::kStrideW || C::kJoined == C::kStrideW * C::kOut);

  // Applies the epilogue to the sums of one store, whose first output lies at `at`.
  __device__ __forceinline__ void finish_run(const Scalar* at, int co, int present,
                                             float (&sums)[C::kJoined]) const {
    const long long offset = at - static_cast<const Scalar*>(args.y);
    const int channel = group * C::kOut + co;
    if constexpr (kPoints && C::kOut > 1) {  // all channels of one position after the other
#pragma unroll
      for (int first = 0; first < C::kJoined; first += C::kOut) {
        float own[C::kOut];
#pragma unroll
        for (int i = 0; i < C::kOut; ++i) own[i] = sums[first + i];
        finish<C, true>(args, {n, channel, offset + first, 1, present - first}, own);
#pragma unroll
        for (int i = 0; i < C::kOut; ++i) sums[first + i] = own[i];
      }
    } else {
      finish<C, false>(args, {n, channel, offset, 1, present}, sums);
    }
  }

  // Runs the program over the channels of all phases of a position. It stores the result if that has one
  // number per position, and tells whether it did.
  __device__ __forceinline__ bool run_over_channels(float (&total)[kPhases][C::kOut], int d, int first_h,
                                                    int first_w) const {
    using Channels = ChannelProgram<C>;
#pragma unroll
    for (int f = 0; f < kPhases; ++f) {
      const int h = first_h + f / C::kStrideW, w = first_w + f % C::kStrideW;
      const bool exists = h < args.y_size.h && w < args.y_size.w;
      const long long offset = n * args.y_strides.n + d * args.y_strides.d + h * args.y_strides.h +
                               static_cast<long long>(w) * args.y_strides.w;
#pragma unroll
      for (int co = 0; co < C::kOut; ++co) {
        float one[1] = {total[f][co]};
        finish<C, true>(args, {n, co, offset + co * args.y_strides.c, 1, exists ? 1 : 0}, one);
        total[f][co] = one[0];
      }
      Channels::template run<1>(total[f], C::kOut, [](int i) { return i; });
      if constexpr (C::Epilogue::kOnePerPosition) {
        if (exists)
          Channels::template store_number<C::kChannelsLastOut>(args.y, offset, n, args.y_strides.c, C::kOut,
                                                               total[f][0]);
      }
    }
    return C::Epilogue::kOnePerPosition;
  }

  __device__ __forceinline__ void store(float (&total)[kPhases][C::kOut], int d, int first_h, int first_w) {
    if constexpr (C::Epilogue::kOverChannels) {
      if (run_over_channels(total, d, first_h, first_w)) return;
    }
    Scalar* y = static_cast<Scalar*>(args.y) + n * args.y_strides.n +
                static_cast<long long>(group) * C::kOut * args.y_strides.c + d * args.y_strides.d;
#pragma unroll
    for (int run = 0; run < C::kStrideH * kRuns; ++run) {
      const int line = run / kRuns, co = kPoints ? 0 : run % C::kOut;
      const int phase = C::kJoined == 1 ? run % kRuns / C::kOut : 0;
      const int h = first_h + line, w = first_w + phase;
      if (h >= args.y_size.h || w >= args.y_size.w) continue;
      Scalar* at = y + co * args.y_strides.c + h * args.y_strides.h + w * args.y_strides.w;
      const int present = (args.y_size.w - w) * (kPoints ? C::kOut : 1);
      float sums[C::kJoined];
#pragma unroll
      for (int i = 0; i < C::kJoined; ++i) {
        const int f = line * C::kStrideW + phase + (kPoints ? i / C::kOut : i);
        sums[i] = total[f][kPoints ? i % C::kOut : co];
      }
      if constexpr (!C::Epilogue::kOverChannels) finish_run(at, co, present, sums);
      Vector<Scalar, C::kJoined> values;
#pragma unroll
      for (int i = 0; i < C::kJoined; ++i) values.at[i] = Narrow<Scalar>::from(sums[i]);
      if (present >= C::kJoined &&
          reinterpret_cast<unsigned long long>(at) % alignof(decltype(values)) == 0) {
        *reinterpret_cast<Vector<Scalar, C::kJoined>*>(at) = values;
      } else {
#pragma unroll
        for (int i = 0; i < C::kJoined; ++i) {
          if (i < present) at[i] = values.at[i];
        }
      }
    }
  }

  __device__ __forceinline__ void gather_all(int plane) {
    for (int round = 0; round < kRounds; ++round) gather(threadIdx.x + round * C::kThreads, plane);
  }

  __device__ __forceinline__ void compute() {
    locate();
    start_ring();
#pragma unroll
    for (int i = 0; i < C::kStages - 1; ++i) copy_next();
    stage_weights();
    clear_columns();
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][tile][i] = 0.0f;
      }
    }
    __syncthreads();
    // Warps of one scheduler, whose indices are four apart, gather at different times.
    const int gather_chunk = warp / 4 * kChunks / ((kWarps + 3) / 4);
    const int last_plane = (last_output - 1 + C::kPaddingD) / C::kStrideD;
    int stage = 0;
    for (int plane = first_plane; plane <= last_plane; ++plane) {
      // Tells whether the outputs of the previous plane are still to be gathered.
      const bool waiting = plane > first_plane;
      if (plane < args.x_size.d) {
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          ptx::copy_wait<C::kStages - 2>();
          __syncwarp();  // the stage is visible to all lanes, and no lane still reads the previous one
          copy_next();
          multiply(ring + stage * kStageItems, chunk);
          stage = stage + 1 < C::kStages ? stage + 1 : 0;
          if (waiting && chunk == gather_chunk) gather_all(plane - 1);
        }
      } else if (waiting) {  // planes behind the end of the input only complete outputs
        gather_all(plane - 1);
      }
      __syncthreads();  // all threads have gathered their outputs
      exchange();
      __syncthreads();
    }
    gather_all(last_plane);
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = FewOutputs<Config>;
  unsigned* shared = dynamic_shared<unsigned>();
  float* columns =
      reinterpret_cast<float*>(shared + Kernel::kSteps * Kernel::kTiles * 32 * Kernel::kPairWords);
  auto* ring = reinterpret_cast<typename Config::Scalar*>(columns + Kernel::kGroupTiles * 8 * Config::kPitch);
  const int warp = threadIdx.x / Kernel::kLanes;
  Kernel kernel{args, shared, columns, ring + warp * (Config::kStages * Kernel::kStageItems)};
  kernel.compute();
}

}  // namespace tconv3d
