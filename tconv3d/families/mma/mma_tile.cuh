// A block of the kernel on mma.sync (mma.cuh): its positions, channels, phases and taps, and the halo of
// x that they need.
//
// Along the innermost kUnrolled dimensions (none, w, hw or dhw) a block has all phases, and all taps are
// known at compile time. Along the other dimensions a block has one phase, and the taps are rows: one tap
// along each of these dimensions. Rows that read from one halo form a source. The forward pass has one source
// for each block phase. The input gradient has one source for each phase of dy along d and h, whose halo has
// only the lines of dy that lie kLineStepD and kLineStepH apart. The planner lists sources and rows
// (model.py).
//
// The 16 rows of a warp's tile are 16 lines of the block's box at one w, and the warp's kTilesM tiles are
// neighbours along w. The fragments that a tap reads for one tile are therefore those that the next tap along
// w reads for a neighbouring tile, and are loaded once, as a window. Where neighbouring positions read x at a
// distance of kInputStepW along w, lines of the halo are stored as kInputStepW planes, so that windows are
// dense for any stride. With kAlongW, the 16 rows of a warp's only tile are neighbours along w, which layers
// can have whose taps share no fragments: 8 lanes then hold neighbouring outputs, and store whole sectors.
//
// Taps of a dilated dimension read x at a distance. Along such a dimension the positions of a tile may be
// those of one class (planning/classes.py): kClasses positions apart, so that all their taps read a lattice
// of x, and the halo has the points of the lattice alone. Positions q then count within the class, kInputStep
// and kOutputStep lead from one of them to the next, and points of the halo lie kLineStep apart in x.
#pragma once

#include "epilogue.cuh"
#include "mma_layout.cuh"

namespace tconv3d {

template <class C>
struct MmaTile {
  using Layout = MmaLayout<C>;
  using Scalar = typename C::Scalar;

  static constexpr bool kUnrollD = C::kUnrolled >= 3, kUnrollH = C::kUnrolled >= 2,
                        kUnrollW = C::kUnrolled >= 1;
  static constexpr int kBlockPhasesD = kUnrollD ? 1 : C::kPhasesD;
  static constexpr int kBlockPhasesH = kUnrollH ? 1 : C::kPhasesH;
  static constexpr int kBlockPhasesW = kUnrollW ? 1 : C::kPhasesW;
  static constexpr int kBlockPhases = kBlockPhasesD * kBlockPhasesH * kBlockPhasesW;
  // Distance between neighbouring positions of the tile, in lines of the halo.
  static constexpr int kHaloStepD = C::kInputStepD / C::kLineStepD;
  static constexpr int kHaloStepH = C::kInputStepH / C::kLineStepH;
  // Planes of a line of the halo: one for each residue of the distance between positions, in its items.
  static constexpr int kPlanesW = C::kInputStepW / C::kLineStepW;
  static_assert(kPlanesW * C::kLineStepW == C::kInputStepW, "positions of a class lie on the lattice");

  // A halo has kPieces planes of pieces: 16 bytes of the channels of a chunk, of every position. A position
  // has the same slot in each plane. Lines are an odd number of slots apart, so that the rows of 16 bytes
  // that ldmatrix reads from 8 lines lie in different banks.
  static constexpr int kSlotBytes = 16, kPieces = Layout::kChunkWords / 4;

  const Args& args;
  int n, group, slice;            // first batch item, group, slice of output channels
  int split;                      // number of the block among those that share the channels of a tile
  int first_d, first_h, first_w;  // first position q of the tile
  int class_d, class_h, class_w;  // class of the tile's positions
  int phase_d, phase_h, phase_w;  // phases of the block along dimensions that are not unrolled
  int first_source, sources;      // first source and number of sources of the block
  int first_row, rows;            // first row and number of rows of taps of the block
  int first_step, steps;          // first step and number of steps of a chunk of the block
  int place;                      // number of the block among those with its batch items and channels
  int first_chunk,
      last_chunk;  // chunks of input channels from the first to before the last that the block sums
  bool exists;     // the block has so many tiles
  unsigned long long needed;  // with kCrops: a bit for each of the block's steps that reads x

  // Tile `number` of the block.
  __device__ __forceinline__ MmaTile(const Args& args, int number) : args(args) {
    int block = blockIdx.x;
    const int phase = block % kBlockPhases;
    block /= kBlockPhases;
    slice = block % Layout::kSlices;
    block /= Layout::kSlices;
    group = block % C::kGroups;
    block /= C::kGroups;
    constexpr int kOwnChunks = (Layout::kChunks + C::kSplits - 1) / C::kSplits;
    split = block % C::kSplits;
    block /= C::kSplits;
    first_chunk = split * kOwnChunks;
    last_chunk = first_chunk + kOwnChunks < Layout::kChunks ? first_chunk + kOwnChunks : Layout::kChunks;
    if constexpr (C::kResident) block = block * args.tiles_of_block + number;
    const int rest_w = divide(block, args.tiles_w), rest_h = divide(rest_w, args.tiles_h);
    const int rest_d = divide(rest_h, args.tiles_d);
    first_w = block - rest_w * static_cast<int>(args.tiles_w.divisor);
    first_h = rest_w - rest_h * static_cast<int>(args.tiles_h.divisor);
    first_d = rest_h - rest_d * static_cast<int>(args.tiles_d.divisor);
    class_w = take_class<C::kClassesW>(first_w, args.classes_w);
    class_h = take_class<C::kClassesH>(first_h, args.classes_h);
    class_d = take_class<C::kClassesD>(first_d, args.classes_d);
    first_w *= args.tile.w;
    first_h *= args.tile.h;
    first_d *= args.tile.d;
    n = rest_d * args.tile_n;
    const int tiles = static_cast<int>(args.tiles_d.divisor * args.tiles_h.divisor * args.tiles_w.divisor);
    place = (block - rest_d * tiles) * kBlockPhases + phase;
    exists = n < args.batch && (!C::kResident || number < args.tiles_of_block);

    phase_w = phase % kBlockPhasesW;
    phase_h = phase / kBlockPhasesW % kBlockPhasesH;
    phase_d = phase / (kBlockPhasesW * kBlockPhasesH);
    first_source = C::kFirstSource(phase);
    sources = C::kFirstSource(phase + 1) - first_source;
    first_row = C::kFirstRow(first_source);
    rows = C::kFirstRow(first_source + sources) - first_row;
    first_step = C::kFirstStep(phase);
    steps = C::kFirstStep(phase + 1) - first_step;
    if constexpr (C::kCrops) find_needed();
  }

  // Returns the class of a box from its number along a dimension, where the classes of a place are
  // neighbours, and leaves the number of the box in its class.
  template <int kClasses>
  static __device__ __forceinline__ int take_class(int& number, const Divider& classes) {
    if constexpr (kClasses == 1) return 0;
    const int box = divide(number, classes), own = number - box * static_cast<int>(classes.divisor);
    number = box;
    return own;
  }

  // ---- Sources, counted from the block's first source.

  // Returns the position of x at which a source's halo begins. It may lie outside of x.
  __device__ __forceinline__ Extent start(int source) const {
    return {first_d * C::kInputStepD + class_d * C::kClassInputD + C::kLeastD(first_source + source),
            first_h * C::kInputStepH + class_h * C::kClassInputH + C::kLeastH(first_source + source),
            first_w * C::kInputStepW + class_w * C::kClassInputW + C::kLeastW(first_source + source)};
  }
  // Returns the offset in x of a source's halo, for the first batch item and the group's first channel.
  __device__ __forceinline__ long long origin(int source) const {
    const Extent at = start(source);
    return n * args.x_strides.n + static_cast<long long>(group) * C::kReduced * args.x_strides.c +
           at.d * args.x_strides.d + at.h * args.x_strides.h + at.w * args.x_strides.w;
  }

  // ---- Steps, counted from the block's first step: up to kRows rows of taps of one source.

  __device__ __forceinline__ int rows_of(int step) const {
    return C::kWholeSteps ? C::kRows : C::kStepRows(first_step + step);
  }
  // Returns the source of a step, counted from the block's first source.
  __device__ __forceinline__ int source_of(int step) const {
    return C::kMostSources == 1 ? 0 : C::kStepSource(first_step + step);
  }
  // Tells whether a step is the first step of its source, of those that the block does not leave out.
  __device__ __forceinline__ bool begins_halo(int step) const {
    if constexpr (C::kCrops) {
      const int first = C::kSourceStep(first_source + source_of(step)) - first_step;
      return (needed & ((1ull << step) - (1ull << first))) == 0;
    }
    return C::kMostSources == 1 ? step == 0 : C::kStepBegins(first_step + step) != 0;
  }

  // ---- Steps that a block leaves out (kCrops), because each of their taps reads zeros beyond x at every
  // position of the tile. Rows of taps along unrolled dimensions always count as read.

  // Tells whether the block has a product to compute.
  __device__ __forceinline__ bool computes() const { return rows > 0 && (!C::kCrops || needed != 0); }

  // Returns the first row of taps of a step, counted from the block's first row.
  __device__ __forceinline__ int row_of(int step) const { return C::kStepRow(first_step + step) - first_row; }
  __device__ __forceinline__ int first_needed() const { return __ffsll(static_cast<long long>(needed)) - 1; }
  // Returns the first step from `step` on that is not left out, or -1.
  __device__ __forceinline__ int next_needed(int step) const {
    const unsigned long long rest = needed >> step;
    return rest == 0 ? -1 : step + __ffsll(static_cast<long long>(rest)) - 1;
  }
  // Returns the first step of a later source that is not left out, or -1.
  __device__ __forceinline__ int next_source(int step) const {
    return next_needed(C::kSourceStep(first_source + source_of(step) + 1) - first_step);
  }

  // Tells whether first + i*kStep lies from 0 to before size for some i < count.
  template <int kStep>
  static __device__ __forceinline__ bool meets(int first, int count, int size) {
    const int i = first < 0 ? (kStep - 1 - first) / kStep : 0;
    return i < count && first + i * kStep < size;
  }
  __device__ __forceinline__ bool reads(const Extent& from, int row) const {
    const int d = from.d + C::kRowD(first_row + row) * C::kLineStepD;
    const int h = from.h + C::kRowH(first_row + row) * C::kLineStepH;
    const int w = from.w + C::kRowW(first_row + row) * C::kLineStepW;
    return (kUnrollD || meets<C::kInputStepD>(d, args.tile.d, args.x_size.d)) &&
           (kUnrollH || meets<C::kInputStepH>(h, args.tile.h, args.x_size.h)) &&
           (kUnrollW || meets<C::kInputStepW>(w, args.tile.w, args.x_size.w));
  }
  __device__ __forceinline__ bool needs(int step) const {
    const Extent from = start(source_of(step));
    bool any = false;
    for (int i = 0; i < rows_of(step); ++i) any = any || reads(from, row_of(step) + i);
    return any;
  }
  // Each lane looks at two steps.
  __device__ __forceinline__ void find_needed() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned low = __ballot_sync(0xFFFFFFFFu, static_cast<int>(lane < steps && needs(lane)));
    const unsigned high = __ballot_sync(0xFFFFFFFFu, static_cast<int>(lane + 32 < steps && needs(lane + 32)));
    needed = static_cast<unsigned long long>(high) << 32 | low;
  }

  // ---- Slots.

  // Returns the bytes from one plane of pieces to the next.
  __device__ __forceinline__ int piece_bytes() const { return args.slots * kSlotBytes; }

  // Returns the slot of position (d, h, w) of a halo, in bytes from the start of a plane of pieces.
  __device__ __forceinline__ int slot(int d, int h, int w) const {
    return (d * args.sheet + h * args.line + w % kPlanesW * args.plane + w / kPlanesW) * kSlotBytes;
  }
  // Returns the offset in bytes of a window of a row of taps, for the tile's first position.
  __device__ __forceinline__ int window_offset(int row, int window) const {
    return slot(C::kRowD(first_row + row) + C::kWindowD(window),
                C::kRowH(first_row + row) + C::kWindowH(window),
                C::kRowW(first_row + row) + C::kWindowW(window));
  }

  // ---- Positions.

  // A position of the tile. n counts from the tile's first batch item. Lines that the box does not have are
  // mapped to its first line, with `exists` false.
  struct Position {
    int n, d, h, w;
    bool exists;
  };
  __device__ __forceinline__ Position on_line(int line, int w) const {
    const int sheet = divide(line, args.tile_h), item = divide(sheet, args.tile_d);
    if (item >= args.tile_n) return {0, 0, 0, w, false};
    return {item, sheet - item * args.tile.d, line - sheet * args.tile.h, w, n + item < args.batch};
  }
  // Returns a position by its warp, its row among the 16 of the warp's tiles, and the tile m.
  __device__ __forceinline__ Position position(int warp_m, int row, int m) const {
    static_assert(!C::kAlongW || (C::kTilesM == 1 && C::kInputStepW == 1));
    const int lines = divide(warp_m, args.blocks_w);
    if constexpr (C::kAlongW)
      return on_line(lines, (warp_m - lines * static_cast<int>(args.blocks_w.divisor)) * 16 + row);
    const int w = (warp_m - lines * static_cast<int>(args.blocks_w.divisor)) * C::kTilesM + m;
    return on_line(lines * 16 + row, w);
  }
  // Returns the slot where the data that a position reads begins, in bytes from the start of a plane of
  // pieces.
  __device__ __forceinline__ int base(const Position& at) const {
    return ((at.n * args.halo.d + at.d * kHaloStepD) * args.sheet + at.h * kHaloStepH * args.line + at.w) *
           kSlotBytes;
  }

  // The output of phase f at a position of the tile, and whether y has it.
  struct Output {
    int n, d, h, w;
    bool exists;
  };
  __device__ __forceinline__ Output output(const Position& at, int f) const {
    const int d = (first_d + at.d) * C::kOutputStepD + class_d * C::kClassOutputD +
                  (kUnrollD ? C::kPhaseD(f) : phase_d);
    const int h = (first_h + at.h) * C::kOutputStepH + class_h * C::kClassOutputH +
                  (kUnrollH ? C::kPhaseH(f) : phase_h);
    const int w = (first_w + at.w) * C::kOutputStepW + class_w * C::kClassOutputW +
                  (kUnrollW ? C::kPhaseW(f) : phase_w);
    const bool behind = !C::kMayPrecede || (d >= 0 && h >= 0 && w >= 0);
    return {n + at.n, d, h, w,
            at.exists && behind && d < args.y_size.d && h < args.y_size.h && w < args.y_size.w};
  }
};

}  // namespace tconv3d
