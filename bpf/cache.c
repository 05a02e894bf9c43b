/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache.c - what comes into the page cache and leaves it, who brought it, and what readahead
 * decided.
 *
 * Folios come one by one; neighbours that one thread brings one after the other are one event. The
 * run that a thread is in stays in `runs` until the next one begins: the recorder takes what is
 * left there at the end.
 */
struct run {
	u64 start, end, first_ns, last_ns;
	u32 pid;
	u32 folios;
	u16 file, kind;
	u32 pad;
};
/* by thread; additions and removals apart */
struct run_key {
	u32 tid;
	u32 kind;
};
BPF_HASH(runs, struct run_key, struct run, 16384);

#define RUN_MAX_BYTES (16ull << 20)
#define RUN_MAX_NS 20000000ull

static __always_inline void put_run(struct run *r, u32 tid)
{
	struct event *e = reserve();

	if (!e)
		return;
	e->time_ns = r->first_ns;
	e->offset = r->start;
	e->length = r->end - r->start;
	e->value = r->last_ns - r->first_ns;
	e->pid = r->pid;
	e->tid = tid;
	e->kind = r->kind;
	e->file = r->file;
	e->aux = r->folios;
	events.ringbuf_submit(e, NO_WAKEUP);
}

static __always_inline void extend(u32 kind, u16 file, u64 offset, u64 length)
{
	u64 task = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	struct run_key key = { .tid = task, .kind = kind };
	struct run *r = runs.lookup(&key), fresh = {};

	if (r) {
		if (r->file == file && r->end == offset && r->end - r->start < RUN_MAX_BYTES &&
		    now - r->first_ns < RUN_MAX_NS) {
			r->end += length;
			r->last_ns = now;
			r->folios++;
			return;
		}
		put_run(r, task);
	}
	fresh.start = offset;
	fresh.end = offset + length;
	fresh.first_ns = fresh.last_ns = now;
	fresh.pid = task >> 32;
	fresh.folios = 1;
	fresh.file = file;
	fresh.kind = kind;
	runs.update(&key, &fresh);
}

#ifdef HAVE_FILL
TRACEPOINT_PROBE(filemap, mm_filemap_add_to_page_cache)
{
	UNLESS_OVER;
	u16 file = number_of(args->i_ino, args->s_dev);
	u64 offset = (u64)args->index << PAGE_BITS, length = 1ull << (PAGE_BITS + args->order);

	if (!file)
		return 0;
	fault_added(bpf_get_current_pid_tgid(), file, offset, length);
	extend(EV_FILL, file, offset, length);
	return 0;
}
#endif

#ifdef HAVE_EVICT
TRACEPOINT_PROBE(filemap, mm_filemap_delete_from_page_cache)
{
	UNLESS_OVER;
	u16 file = file_of(args->i_ino, args->s_dev);

	if (file)
		extend(EV_EVICT, file, (u64)args->index << PAGE_BITS,
		       1ull << (PAGE_BITS + args->order));
	return 0;
}
#endif

#ifdef HAVE_GET_PAGES
TRACEPOINT_PROBE(filemap, mm_filemap_get_pages)
{
	UNLESS_OVER;
	u16 file = number_of(args->i_ino, args->s_dev);

	if (!file)
		return 0;
	fault_over(bpf_get_current_pid_tgid());
	put(EV_READ, file, (u64)args->index << PAGE_BITS,
	    ((u64)args->last_index + 1 - args->index) << PAGE_BITS, 0, 0);
	return 0;
}
#endif

/* The kernel reads so many pages ahead, as of `index`; `how`: order | AHEAD_* << 8. */
static void read_ahead(u64 inode, u64 device, u64 index, u64 pages, u64 async_pages, u32 how)
{
	u16 file = number_of(inode, device);

	if (!file)
		return;
	fault_ahead(bpf_get_current_pid_tgid(), file, how >> 8 == AHEAD_ASYNC);
	put(EV_READAHEAD, file, index << PAGE_BITS, pages << PAGE_BITS, async_pages << PAGE_BITS, how);
}

#ifdef HAVE_RA_ORDER
TRACEPOINT_PROBE(readahead, page_cache_ra_order)
{
	UNLESS_OVER;
	read_ahead(args->i_ino, args->s_dev, args->index, args->size, args->async_size,
		   (args->order & 0xff) | AHEAD_ORDER << 8);
	return 0;
}
#endif

#ifdef HAVE_RA_UNBOUNDED
TRACEPOINT_PROBE(readahead, page_cache_ra_unbounded)
{
	UNLESS_OVER;
	read_ahead(args->i_ino, args->s_dev, args->index, args->nr_to_read, args->lookahead_size,
		   AHEAD_UNBOUNDED << 8);
	return 0;
}
#endif

#ifdef HAVE_RA_SYNC
TRACEPOINT_PROBE(readahead, page_cache_sync_ra)
{
	UNLESS_OVER;
	read_ahead(args->i_ino, args->s_dev, args->index, args->req_count, 0, AHEAD_SYNC << 8);
	return 0;
}
#endif

#ifdef HAVE_RA_ASYNC
TRACEPOINT_PROBE(readahead, page_cache_async_ra)
{
	UNLESS_OVER;
	read_ahead(args->i_ino, args->s_dev, args->index, args->req_count, 0, AHEAD_ASYNC << 8);
	return 0;
}
#endif
