/* SPDX-License-Identifier: Apache-2.0 */
/*
 * faults.c - demand faults, fault-around, and how long a thread slept in a fault.
 *
 * One fault of the hardware is exceptions:page_fault_user (or _kernel, where a system call touches
 * the mapping). Then either fault-around maps the page (mm_filemap_map_pages alone), or
 * filemap_fault() is called (mm_filemap_fault). When that one had to wait and gave up the mmap lock
 * (VM_FAULT_RETRY) the fault begins anew, and now fault-around finds the page, or filemap_fault() is
 * called once more. It is a major fault when the page was not in the cache at first, and so was
 * asked for by the thread itself (mm/memory.c, mm_account_fault); one that waited for a page that was
 * already on its way is not, unless it had to wait again: the first attempt, which holds the VMA's
 * lock alone, counts for nothing (arch/x86/mm/fault.c, do_user_addr_fault), but who comes a third
 * time does so with FAULT_FLAG_TRIED.
 */

/* The exception that a thread took last; only of processes that have mapped a file. */
struct exception {
	u64 time_ns, address;
	u64 start, end; /* the range of `mapped` that the last silent one lay in */
	u64 unmappings; /* as long as there were no more of them */
	u32 pid;
	u16 kernel, around;
	u16 silent, pad;
	u32 pad2;
};
BPF_TABLE("lru_hash", u32, struct exception, exceptions, 16384);

/*
 * The latest large file mappings of a process. A fault in one of them that none of the tracepoints
 * below has told of is *silent*: the page lay in a huge page, which filemap_map_pmd() maps whole
 * and without a word. It is told when the thread takes its next exception, or ends.
 */
#define RANGES 8
#define RANGE_MIN_BYTES (2ull << 20)
struct ranges {
	u64 start[RANGES], end[RANGES];
	u64 n;
};
BPF_HASH(mapped, u32, struct ranges, 4096);
BPF_PERCPU_ARRAY(no_ranges, struct ranges, 1);
BPF_ARRAY(unmappings, u64, 1);

/* The last fault of a thread that went through filemap_fault(). */
struct in_fault {
	u64 time_ns, offset, slept_ns, missed_ns;
	u32 pid;
	u16 file;
	u8 major, open;
	u32 ahead; /* the page was there, with readahead's mark */
	u32 again; /* attempts after the first that came to filemap_fault() */
};
BPF_TABLE("lru_hash", u32, struct in_fault, in_faults, 16384);

#ifdef HAVE_EXCEPTIONS
static __always_inline void put_silent(struct exception *x, u32 tid)
{
	struct event *e = reserve();

	x->silent = 0;
	if (!e)
		return;
	e->time_ns = x->time_ns;
	e->offset = 0;
	e->length = 1 << PAGE_BITS;
	e->value = x->address;
	e->pid = x->pid;
	e->tid = tid;
	e->kind = EV_SILENT;
	e->file = 0;
	e->aux = x->kernel;
	events.ringbuf_submit(e, NO_WAKEUP);
}

static __always_inline int taken(u64 address, u16 kernel)
{
	u64 task = bpf_get_current_pid_tgid();
	u32 pid = task >> 32, tid = task;
	int zero = 0;
	struct exception *x = exceptions.lookup(&tid), fresh = {};
	u64 *gone = unmappings.lookup(&zero);
	struct ranges *r;

	if (!gone)
		return 0;
	if (!x) {
		if (!mapped.lookup(&pid))
			return 0;
		fresh.pid = pid;
		exceptions.update(&tid, &fresh);
		x = exceptions.lookup(&tid);
		if (!x)
			return 0;
	}
	if (x->silent)
		put_silent(x, tid);
	x->time_ns = bpf_ktime_get_ns();
	x->address = address;
	x->kernel = kernel ? IN_KERNEL : 0;
	x->around = 0;
	/* mostly a thread walks through one mapping: it is looked for once */
	if (address >= x->start && address < x->end && x->unmappings == *gone) {
		x->silent = 1;
		return 0;
	}
	x->start = x->end = 0;
	x->unmappings = *gone;
	r = mapped.lookup(&pid);
	if (!r)
		return 0;
#pragma unroll
	for (int i = 0; i < RANGES; i++) {
		if (address >= r->start[i] && address < r->end[i]) {
			x->silent = 1;
			x->start = r->start[i];
			x->end = r->end[i];
		}
	}
	return 0;
}

TRACEPOINT_PROBE(exceptions, page_fault_user)
{
	UNLESS_OVER;
	return taken(args->address, 0);
}

TRACEPOINT_PROBE(exceptions, page_fault_kernel)
{
	UNLESS_OVER;
	return taken(args->address, 1);
}
#endif

/* The exception that the running thread is in, or NULL. Whoever asks tells of it. */
static __always_inline struct exception *current_exception(u32 tid)
{
	struct exception *x = exceptions.lookup(&tid);

	if (x)
		x->silent = 0;
	return x;
}

/* The thread ends. */
static __always_inline void exceptions_over(u32 tid)
{
#ifdef HAVE_EXCEPTIONS
	struct exception *x = exceptions.lookup(&tid);

	if (x && x->silent)
		put_silent(x, tid);
	exceptions.delete(&tid);
#endif
}

/* A process has mapped a file. */
static __always_inline void note_mapped(u32 pid, u64 address, u64 length)
{
	int zero = 0;
	struct ranges *r, *none;
	u32 i;

	if (length < RANGE_MIN_BYTES)
		return;
	r = mapped.lookup(&pid);
	if (!r) {
		none = no_ranges.lookup(&zero);
		if (!none)
			return;
		mapped.update(&pid, none);
		r = mapped.lookup(&pid);
		if (!r)
			return;
	}
	i = r->n++ & (RANGES - 1);
	r->start[i] = address;
	r->end[i] = address + length;
}

/* What lies there next may be anybody's memory. */
static __always_inline void note_unmapped(u32 pid, u64 address, u64 length)
{
	struct ranges *r = mapped.lookup(&pid);
	int zero = 0;
	u64 *gone = unmappings.lookup(&zero);

	if (!r || !gone)
		return;
	__sync_fetch_and_add(gone, 1);
#pragma unroll
	for (int i = 0; i < RANGES; i++)
		if (r->start[i] < address + length && address < r->end[i])
			r->start[i] = r->end[i] = 0;
}

static __always_inline void put_major(struct in_fault *f, u32 tid, u64 time_ns, u64 took_ns)
{
	struct event *e = reserve();

	f->major = 1;
	if (!e)
		return;
	e->time_ns = time_ns;
	e->offset = f->offset;
	e->length = 1 << PAGE_BITS;
	e->value = took_ns;
	e->pid = f->pid;
	e->tid = tid;
	e->kind = EV_MAJOR;
	e->file = f->file;
	e->aux = 0;
	events.ringbuf_submit(e, NO_WAKEUP);
}

/* A fault that missed its page and never had to wait. */
static __always_inline void close_fault(struct in_fault *f, u32 tid)
{
	if (f->open && f->missed_ns && !f->major)
		put_major(f, tid, f->missed_ns, f->missed_ns - f->time_ns);
	f->open = 0;
}

/* One more attempt at a fault that had to wait; `tried`: the second one had to wait as well. */
static __always_inline void try_again(struct in_fault *f, u32 tid, int tried)
{
	u64 now = bpf_ktime_get_ns();

#ifndef HAVE_EXCEPTIONS
	tried = 0; /* it may be the next fault of that page */
#endif
	if ((f->missed_ns || tried) && !f->major)
		put_major(f, tid, now, now - f->time_ns);
}

/* Whether a thread that comes to a page of its last fault is still in that fault: it took no other
 * exception since. */
static __always_inline int is_retry(struct in_fault *f, struct exception *x, u16 file)
{
	return f->open && f->file == file && !(x && x->time_ns > f->time_ns);
}

#ifdef HAVE_MAP_PAGES
TRACEPOINT_PROBE(filemap, mm_filemap_map_pages)
{
	UNLESS_OVER;
	u32 number = number_of(args->i_ino, args->s_dev);
	u16 file = number;
	u64 start = (u64)args->index << PAGE_BITS, end = ((u64)args->last_index + 1) << PAGE_BITS;
	u32 tid = bpf_get_current_pid_tgid(), page = NO_PAGE;
	struct exception *x;
	struct in_fault *f;
	u64 address = 0;

	x = current_exception(tid);
	if (!file)
		return 0;
	f = in_faults.lookup(&tid);
	if (f && is_retry(f, x, file) && f->offset >= start && f->offset < end) {
		try_again(f, tid, f->again >= 1);
#ifndef HAVE_EXCEPTIONS
		f->open = 0; /* nothing tells this fault from the next one of that page */
#endif
		if (!(number & COSTS_ONLY))
			put(EV_MAPPED, file, start, end - start, x ? x->address : 0,
			    (f->offset - start) >> PAGE_BITS);
		return 0;
	}
	if (number & COSTS_ONLY)
		return 0;
	if (x) {
		address = x->address;
		/* the range begins at a multiple of its size in the address space (do_fault_around) */
		page = (address >> PAGE_BITS) & (AROUND_PAGES - 1);
		x->around = AFTER_AROUND;
	}
	put_at(x ? x->time_ns : bpf_ktime_get_ns(), EV_AROUND, file, start, end - start, address, page);
	return 0;
}
#endif

#ifdef HAVE_FAULT
TRACEPOINT_PROBE(filemap, mm_filemap_fault)
{
	UNLESS_OVER;
	u32 number = number_of(args->i_ino, args->s_dev);
	u16 file = number;
	u64 task = bpf_get_current_pid_tgid(), offset = (u64)args->index << PAGE_BITS;
	u32 tid = task;
	struct exception *x;
	struct in_fault *f, fresh = {};

	x = current_exception(tid);
	if (!file)
		return 0;
	f = in_faults.lookup(&tid);
	if (f) {
		if (is_retry(f, x, file) && f->offset == offset) {
			try_again(f, tid, ++f->again >= 2);
			return 0;
		}
		close_fault(f, tid);
	}
	fresh.time_ns = bpf_ktime_get_ns();
	fresh.offset = offset;
	fresh.pid = task >> 32;
	fresh.file = file;
	fresh.open = 1;
	in_faults.update(&tid, &fresh);
	if (!(number & COSTS_ONLY))
		put(EV_FAULT, file, offset, 1 << PAGE_BITS, x ? x->address : 0,
		    x ? x->around | x->kernel : 0);
	return 0;
}
#endif

/* Called when a page comes into the cache (cache.c). */
static __always_inline void fault_added(u32 tid, u16 file, u64 offset, u64 length)
{
	struct in_fault *f = in_faults.lookup(&tid);

	if (f && f->open && f->file == file && f->offset >= offset && f->offset < offset + length &&
	    !f->missed_ns)
		f->missed_ns = bpf_ktime_get_ns();
}

/* Called when readahead is decided (cache.c): because the page was missed, also if another thread
 * was quicker to add it, or because a marked page was met. */
static __always_inline void fault_ahead(u32 tid, u16 file, int marked)
{
	struct in_fault *f = in_faults.lookup(&tid);

	if (!f || !f->open || f->file != file)
		return;
	if (marked)
		f->ahead = 1;
	else if (!f->ahead && !f->missed_ns)
		f->missed_ns = bpf_ktime_get_ns();
}

/* The thread is in a system call: whatever it waits for now is not the fault. */
static __always_inline void fault_over(u32 tid)
{
	struct in_fault *f = in_faults.lookup(&tid);

	if (f && f->open)
		close_fault(f, tid);
}

#ifdef HAVE_SWITCH
#define UNINTERRUPTIBLE 2 /* TASK_UNINTERRUPTIBLE: how a fault sleeps; time(2) and futex do not */

TRACEPOINT_PROBE(sched, sched_switch)
{
	UNLESS_OVER;
	u32 from = args->prev_pid, to = args->next_pid;
	struct in_fault *f;
	struct event *e;

	if (args->prev_state & UNINTERRUPTIBLE) {
		f = in_faults.lookup(&from);
		if (f && f->open)
			f->slept_ns = bpf_ktime_get_ns();
	}
	f = in_faults.lookup(&to);
	if (!f || !f->slept_ns)
		return 0;
	e = reserve();
	if (e) {
		e->time_ns = bpf_ktime_get_ns();
		e->offset = f->offset;
		e->length = 1 << PAGE_BITS;
		e->value = e->time_ns - f->slept_ns;
		e->pid = f->pid;
		e->tid = to;
		e->kind = EV_WAIT;
		e->file = f->file;
		e->aux = 0;
		events.ringbuf_submit(e, NO_WAKEUP);
	}
	f->slept_ns = 0;
	return 0;
}
#endif
