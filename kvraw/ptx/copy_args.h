// The argument block of the copy kernels. kvraw/copying/kernel_args.py holds the same structure as a numpy dtype; the
// table at the end carries the offsets into the PTX text, where the tests compare the two.
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;

#define DIMS 4
#define WORDS 448 // with the fields below it: just under the 4096 bytes of arguments that every target takes

enum Flags {
    INDEX_INLINE = 1,  // index is an offset into words[], not an address
    INDEX_I64 = 2,     // index is the address of int64 values
    INDEX_I32 = 4,     // index is the address of int32 values
    TABLE_INLINE = 8,  // table is an offset into words[], not an address
    SKIP_NEGATIVE = 16, // an index below zero means: leave this item out
    CHECK = 32          // an index outside [0, limit) is reported and left out
};

struct CopySide {
    u64 table;       // base addresses
    u64 index;       // one index per item; without one of the INDEX flags the item is its own index
    u64 limit;       // indices are below it
    u64 page;        // outer, inner = divmod(index, page)
    u64 page_magic;
    u64 outer;       // bytes per outer step (two's complement, as all strides)
    u64 inner;       // bytes per inner step
    u64 table_outer; // table entries per outer step
    u64 stride[DIMS];
    u64 table_stride[DIMS];
    u32 page_shift;
    u32 flags;
};

struct CopyArgs {
    CopySide src, dst;
    u64 size[DIMS]; // innermost first
    u64 magic[DIMS];
    u64 split;       // segments per run
    u64 split_magic;
    u64 run_vectors; // vectors per run
    u64 segments;    // items * sizes * split
    u64 first_item;
    u64 status;      // address of two words, or 0
    u64 pace;        // address of the time from which on the link is free, in sixteenths of a nanosecond; 0: no pace
    u64 pace_slack;  // how much of an idle link's time may be made up for
    u64 pace_cost;   // time that 256 vectors take; 0: no pace
    u64 pace_mean;   // what 256 vectors take in the long run, by the time behind that one; 0: no more
    u64 pace_credit; // how much of an idle link's time may be made up for in the long run
    u64 pace_other;  // address of the time of the link's other direction
    u64 pace_extra;  // what 256 vectors take longer while that is in use
    u32 shift[DIMS];
    u32 split_shift;
    u32 segment_vectors; // at most 128
    u32 vector_magic;    // ceil(2^31 / segment_vectors)
    u32 reserved;
    u64 words[WORDS];
};

#define AT(field) (u32)(unsigned long long)&((CopyArgs *)0)->field
#define SIDE_AT(s)                                                                                              \
    AT(s.table), AT(s.index), AT(s.limit), AT(s.page), AT(s.page_magic), AT(s.outer), AT(s.inner), AT(s.table_outer), \
        AT(s.stride), AT(s.table_stride), AT(s.page_shift), AT(s.flags)
extern "C" __device__ const u32 kvraw_copy_layout[] = {
    SIDE_AT(src), SIDE_AT(dst), AT(size), AT(magic), AT(split), AT(split_magic), AT(run_vectors), AT(segments),
    AT(first_item), AT(status), AT(pace), AT(pace_slack), AT(pace_cost), AT(pace_mean), AT(pace_credit), AT(pace_other),
    AT(pace_extra), AT(shift), AT(split_shift), AT(segment_vectors), AT(vector_magic), AT(reserved), AT(words),
    (u32)sizeof(CopyArgs)};
