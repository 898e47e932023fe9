// The producer of group_backward.cuh: copies of dy and x to shared memory.
#pragma once

#include "group_backward_tiles.cuh"

namespace tconv3d {

template <class C>
struct GroupProducer : GroupTiles<C> {
  using Tiles = GroupTiles<C>;
  using Tiles::args, Tiles::bundle, Tiles::empty, Tiles::empty_x, Tiles::first_line, Tiles::first_out,
      Tiles::full;
  using Tiles::full_x, Tiles::lane, Tiles::offset_of, Tiles::split, Tiles::stage_bytes;
  using Tiles::kBulk, Tiles::kCell, Tiles::kCellX, Tiles::kItem, Tiles::kLast, Tiles::kLines, Tiles::kPieces;
  using Tiles::kPiecesX, Tiles::kPieceX;
  using Tiles::stage_x_bytes, Tiles::stages, Tiles::stages_x, Tiles::task_at, Tiles::warp;
  using typename Tiles::Rings, typename Tiles::Scalar, typename Tiles::Task;

  // Copies a run of a tensor, extended to multiples of 16 bytes at both ends, by all lanes. No copy reads
  // past the tensor's last element.
  __device__ __forceinline__ void copy_run(unsigned char* to, const void* tensor, long long first, int count,
                                           long long all) const {
    const long long begin = first * kItem / 16 * 16, end = min(first + count, all) * kItem;
    const int bytes = static_cast<int>(end - begin);
    const int left = static_cast<int>(min(all * kItem - begin, static_cast<long long>(bytes) + 16));
    const unsigned char* const from = static_cast<const unsigned char*>(tensor) + begin;
    const unsigned own = ptx::shared_address(to);
#pragma unroll 4
    for (int at = 16 * lane; at < bytes; at += 16 * 32)
      ptx::copy_beginning_once(own + at, from + at, min(left - at, 16));
  }

  // Copies a run by a bulk copy, which must not read past the tensor's last multiple of 16 bytes: the
  // lane copies the elements beyond it itself.
  __device__ __forceinline__ void copy_in_bulk(unsigned char* to, const void* tensor, long long first,
                                               int count, long long all, unsigned barrier) const {
    const long long begin = first * kItem / 16 * 16, end = (first + count) * kItem;
    const long long last = min((end + 15) / 16 * 16, all * kItem / 16 * 16);
    for (long long at = max(last, first * kItem); at < end; at += kItem) {
      *reinterpret_cast<Scalar*>(to + (at - begin)) =
          *reinterpret_cast<const Scalar*>(static_cast<const unsigned char*>(tensor) + at);
    }
    const unsigned bytes = static_cast<unsigned>(max(last - begin, 0ll));
    ptx::barrier_arrive_expect(barrier, bytes);
    if (bytes > 0) {
      ptx::bulk_copy(ptx::shared_address(to), static_cast<const unsigned char*>(tensor) + begin, bytes,
                     barrier);
    }
  }

  // Copies a run of each of kChannels channels to a stage, where channels are `pitch` bytes apart.
  template <int kChannels>
  __device__ __forceinline__ void copy_channels(unsigned char* stage, int pitch, const void* tensor,
                                                long long first, long long apart, int count, long long all,
                                                unsigned barrier) const {
    if constexpr (kBulk) {
      if (lane < kChannels)
        copy_in_bulk(stage + lane * pitch, tensor, first + lane * apart, count, all, barrier);
    } else {
#pragma unroll 1
      for (int c = warp; c < kChannels; c += C::kProducers)
        copy_run(stage + c * pitch, tensor, first + c * apart, count, all);
    }
  }

  // Copies a bundle's pieces of the positions of a line. to_of(position) returns the address of a cell.
  template <int kPieces, int kBytes, class To>
  __device__ __forceinline__ void copy_cells(const void* tensor, long long first, int width, long long step,
                                             To&& to_of) const {
    const int piece = lane % kPieces;
    const unsigned char* from = static_cast<const unsigned char*>(tensor) + first * kItem + kBytes * piece;
    from += lane / kPieces * (step * kItem);
#pragma unroll 4
    for (int w = lane / kPieces; w < width; w += 32 / kPieces) {
      ptx::copy_words_of_line<kBytes / 4>(to_of(w) + kBytes * piece, from, true);
      from += 32 / kPieces * (step * kItem);
    }
  }

  // Byte offset of the cell of a position within a line of dy in a stage.
  __device__ __forceinline__ int cell_at(int w) const {
    const int from_padding = w + C::kPaddingW;
    return from_padding % C::kStrideW * args.pitch + from_padding / C::kStrideW * (kCell * kItem);
  }

  __device__ __forceinline__ void copy_plane(const Task& task, int plane, int stage) const {
    const int first = first_line(task), from = max(first, 0);
    const int lines = min(first + kLines + C::kStrideH * C::kRows * (args.bands - 1), args.dy_size.h) - from;
    if constexpr (kLast) {
      for (int line = warp; line < lines; line += C::kProducers) {
        unsigned char* const to = stages + stage * stage_bytes() + line * (C::kStrideW * args.pitch);
        copy_cells<kPieces, 16>(args.dy, offset_of(args.dy_strides, task.n, first_out(), plane, from + line),
                                args.dy_size.w, args.dy_strides.w, [&](int w) { return to + cell_at(w); });
      }
    } else {
      copy_channels<C::kOut>(stages + stage * stage_bytes(), args.pitch, args.dy,
                             offset_of(args.dy_strides, task.n, first_out(), plane, from), args.dy_strides.c,
                             max(lines, 0) * args.dy_size.w, args.dy_count, full(stage));
    }
    if constexpr (!kBulk) ptx::copy_arrive(full(stage));
  }

  __device__ __forceinline__ void copy_x(const Task& task, int plane, int stage) const {
    const int lines = min(args.bands * C::kRows, args.size.h - task.h);
    if constexpr (kLast) {
      for (int line = warp; line < lines; line += C::kProducers) {
        unsigned char* const to = stages_x + stage * stage_x_bytes() + line * args.pitch_x;
        copy_cells<kPiecesX, kPieceX>(
            args.x, offset_of(args.x_strides, task.n, bundle * C::kIn, plane, task.h + line), args.size.w,
            args.x_strides.w, [&](int w) { return to + w * (kCellX * kItem); });
      }
    } else {
      copy_channels<C::kIn>(stages_x + stage * stage_x_bytes(), args.pitch_x, args.x,
                            offset_of(args.x_strides, task.n, bundle * C::kIn, plane, task.h),
                            args.x_strides.c, lines * args.size.w, args.x_count, full_x(stage));
    }
    if constexpr (!kBulk) ptx::copy_arrive(full_x(stage));
  }

  __device__ __forceinline__ void produce(Rings& rings) const {
    Ring &stage = rings.dy, &stage_x = rings.x;
    for (int index = split; index < args.tasks; index += args.splits) {
      const Task task = task_at(index);
      for (int q = task.begin + C::kMinShiftD; q < task.end + C::kMaxShiftD; ++q) {
        if (C::kWeightWarps > 0 && q - C::kMinShiftD < task.end) {
          Tiles::wait(empty_x(stage_x.index), stage_x.parity ^ 1u);
          copy_x(task, q - C::kMinShiftD, stage_x.index);
          stage_x.advance(args.stages_x);
        }
        static_for<C::kStrideD>([&](auto phase) {
          constexpr int kPhase = decltype(phase)::value;
          if (!Tiles::template needed<kPhase>(task, q)) return;
          Tiles::wait(empty(stage.index), stage.parity ^ 1u);
          copy_plane(task, C::kStrideD * q + kPhase, stage.index);
          stage.advance(args.stages);
        });
      }
    }
  }
};

}  // namespace tconv3d
