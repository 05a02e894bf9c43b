/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event.h - what the programs of this folder hand over: uffdprefetch/trace/file/events.py in C.
 *
 * Programs take tracepoint arguments only, never a kernel structure: they are compiled against
 * whatever headers the machine has. trace/record/kernel_tracer.py puts the files together, this one
 * first, with HAVE_* for each tracepoint that the kernel has, RING_PAGES, OPENS_PAGES, AROUND_PAGES
 * and CPUS.
 */
#define EV_FAULT 1
#define EV_MAJOR 2
#define EV_AROUND 3
#define EV_WAIT 4
#define EV_FILL 5
#define EV_EVICT 6
#define EV_READAHEAD 7
#define EV_READ 8
#define EV_BLOCK 9
#define EV_CALL 10
#define EV_MAP 11
#define EV_BORN 12
#define EV_EXEC 13
#define EV_EXIT 14
#define EV_MAPPED 15
#define EV_SILENT 101 /* for the recorder alone: a fault at address `value` (faults.c) */
#define EV_NEW_FILE 100 /* for the recorder alone: offset: inode, value: device, file: its number */

#define AFTER_AROUND 1
#define IN_KERNEL 2
#define NO_PAGE 0xFFFFFFFFu

#define AHEAD_SYNC 1
#define AHEAD_ASYNC 2
#define AHEAD_ORDER 3
#define AHEAD_UNBOUNDED 4

#define CALL_MMAP 2
#define CALL_READ 3
#define CALL_PREAD 4
#define CALL_WRITE 5

#define PAGE_BITS 12
#define NO_WAKEUP 1 /* BPF_RB_NO_WAKEUP: the recorder looks by the clock; waking costs the job */

struct event {
	u64 time_ns, offset, length, value;
	u32 pid, tid;
	u16 kind, file;
	u32 aux;
};

struct file_key {
	u64 inode;
	u64 device;
};

/* All files that a job touches, wanted or not: the interpreter of a large Python program has some
 * ten thousand modules. Beyond, events are lost, and counted. About 5 MB. */
#define FILES_MAX 65536
/* Numbers from here on are the recorder's (trace/record/file_registry.py) */
#define NUMBERS_END 60000u
#define UNWANTED 0xFFFFu
/* In the value of `files`: of a program, a library or a small file only what it costs is told: what
 * comes from storage, read(2), major faults; and only of the job's processes. */
#define COSTS_ONLY 0x10000u

BPF_RINGBUF_OUTPUT(events, RING_PAGES);
BPF_ARRAY(lost, u64, 1);
/* numbers given to files by each CPU: they are dealt out like cards, so that no two give the same */
BPF_PERCPU_ARRAY(files_given, u32, 1);
/* (inode, device) -> number, or UNWANTED: the recorder decides by path and size */
BPF_HASH(files, struct file_key, u32, FILES_MAX);
/* processes of the job -> RECORDED, or CHILDREN_ONLY (the launcher) */
#define RECORDED 1
#define CHILDREN_ONLY 2
BPF_HASH(tracked, u32, u32, 16384);

/* Set at the end of a recording: taking the probes away takes tens of milliseconds for each. */
BPF_ARRAY(over, u32, 1);

static __always_inline int is_over(void)
{
	int zero = 0;
	u32 *yes = over.lookup(&zero);

	return yes && *yes;
}

/* Each probe begins with it. */
#define UNLESS_OVER                \
	do {                       \
		if (is_over())     \
			return 0;  \
	} while (0)

static __always_inline void count_lost(void)
{
	int zero = 0;
	u64 *n = lost.lookup(&zero);

	if (n)
		__sync_fetch_and_add(n, 1);
}

static __always_inline struct event *reserve(void)
{
	struct event *e = events.ringbuf_reserve(sizeof(*e));

	if (!e)
		count_lost();
	return e;
}

static __always_inline void put_at(u64 time_ns, u16 kind, u16 file, u64 offset, u64 length,
				   u64 value, u32 aux)
{
	struct event *e = reserve();
	u64 task = bpf_get_current_pid_tgid();

	if (!e)
		return;
	e->time_ns = time_ns;
	e->offset = offset;
	e->length = length;
	e->value = value;
	e->pid = task >> 32;
	e->tid = task;
	e->kind = kind;
	e->file = file;
	e->aux = aux;
	events.ringbuf_submit(e, NO_WAKEUP);
}

static __always_inline void put(u16 kind, u16 file, u64 offset, u64 length, u64 value, u32 aux)
{
	put_at(bpf_ktime_get_ns(), kind, file, offset, length, value, aux);
}

static __always_inline int is_recorded(u32 pid)
{
	u32 *how = tracked.lookup(&pid);

	return how && *how == RECORDED;
}

/* The number of a file that is recorded, perhaps with COSTS_ONLY, or 0. A file that a process of the job touches for the
 * first time gets one; from then on it counts whoever touches it. */
static __always_inline u32 number_of(u64 inode, u64 device)
{
	struct file_key key = { .inode = inode, .device = device };
	u32 *known = files.lookup(&key), *given, number;
	int zero = 0;

	if (known) {
		if (*known & COSTS_ONLY && !is_recorded(bpf_get_current_pid_tgid() >> 32))
			return 0;
		return *known == UNWANTED ? 0 : *known;
	}
	if (!is_recorded(bpf_get_current_pid_tgid() >> 32))
		return 0;
	given = files_given.lookup(&zero);
	if (!given)
		return 0;
	number = *given * CPUS + bpf_get_smp_processor_id() + 1;
	if (number >= NUMBERS_END) {
		count_lost();
		return 0;
	}
	*given += 1;
	if (files.insert(&key, &number)) {
		known = files.lookup(&key); /* another CPU was first, or there is no room */
		if (!known)
			count_lost();
		return known && *known != UNWANTED ? *known : 0;
	}
	put(EV_NEW_FILE, number, inode, 0, device, 0);
	return number;
}

/* The number of a record file, or 0. */
static __always_inline u16 file_of(u64 inode, u64 device)
{
	u32 number = number_of(inode, device);

	return number & COSTS_ONLY ? 0 : number;
}
