/* SPDX-License-Identifier: Apache-2.0 */
/*
 * calls.c - open, mmap, read, pread and write of the job ([Stanovnik] figure 4), and its processes.
 */
/* A path that was opened, or executed (fd -1), goes its own way: it is long, and rare. */
#define PATH_BYTES 232
struct opened {
	u64 time_ns, took_ns;
	u32 pid, tid;
	s32 fd;
	u32 flags;
	char path[PATH_BYTES];
};
BPF_RINGBUF_OUTPUT(opens, OPENS_PAGES);

/* Smaller mappings are not told: checkpoints are a page. */
#define MAP_MIN_BYTES 65536

struct call {
	u64 time_ns, offset, length;
	u32 what, fd;
};
BPF_TABLE("lru_hash", u32, struct call, calls, 16384);

static __always_inline int enter(u32 what, u32 fd, u64 offset, u64 length)
{
	u64 task = bpf_get_current_pid_tgid();
	u32 tid = task;
	struct call c = {};

	if (!is_recorded(task >> 32))
		return 0;
	fault_over(tid);
	c.time_ns = bpf_ktime_get_ns();
	c.offset = offset;
	c.length = length;
	c.what = what;
	c.fd = fd;
	calls.update(&tid, &c);
	return 0;
}

static __always_inline int leave(s64 returned)
{
	u32 tid = bpf_get_current_pid_tgid();
	struct call *c = calls.lookup(&tid);

	if (!c)
		return 0;
	if (returned >= 0 || returned < -4095) {
		int is_mmap = c->what == CALL_MMAP;

		if (is_mmap && c->length >= MAP_MIN_BYTES) {
			note_mapped(bpf_get_current_pid_tgid() >> 32, returned, c->length);
			put(EV_MAP, 0, c->offset, c->length, returned, c->fd);
		}
		put(EV_CALL, 0, c->offset, is_mmap ? c->length : returned,
		    bpf_ktime_get_ns() - c->time_ns, c->what | (c->fd & 0xffffff) << 8);
	}
	calls.delete(&tid);
	return 0;
}

#ifdef HAVE_CALLS
TRACEPOINT_PROBE(syscalls, sys_enter_mmap)
{
	UNLESS_OVER;
	if ((s32)args->fd < 0)
		return 0;
	return enter(CALL_MMAP, args->fd, args->off, args->len);
}
TRACEPOINT_PROBE(syscalls, sys_enter_munmap)
{
	UNLESS_OVER;
	note_unmapped(bpf_get_current_pid_tgid() >> 32, args->addr, args->len);
	return 0;
}
TRACEPOINT_PROBE(syscalls, sys_enter_read)
{
	UNLESS_OVER;
	return enter(CALL_READ, args->fd, 0, args->count);
}
TRACEPOINT_PROBE(syscalls, sys_enter_pread64)
{
	UNLESS_OVER;
	return enter(CALL_PREAD, args->fd, args->pos, args->count);
}
TRACEPOINT_PROBE(syscalls, sys_enter_write)
{
	UNLESS_OVER;
	return enter(CALL_WRITE, args->fd, 0, args->count);
}
TRACEPOINT_PROBE(syscalls, sys_exit_mmap)
{
	UNLESS_OVER;
	return leave(args->ret);
}
TRACEPOINT_PROBE(syscalls, sys_exit_read)
{
	UNLESS_OVER;
	return leave(args->ret);
}
TRACEPOINT_PROBE(syscalls, sys_exit_pread64)
{
	UNLESS_OVER;
	return leave(args->ret);
}
TRACEPOINT_PROBE(syscalls, sys_exit_write)
{
	UNLESS_OVER;
	return leave(args->ret);
}

struct opening {
	u64 time_ns, path;
	u32 flags, pad;
};
BPF_TABLE("lru_hash", u32, struct opening, openings, 4096);

TRACEPOINT_PROBE(syscalls, sys_enter_openat)
{
	UNLESS_OVER;
	u64 task = bpf_get_current_pid_tgid();
	u32 tid = task;
	struct opening o = {};

	if (!is_recorded(task >> 32))
		return 0;
	fault_over(tid);
	o.time_ns = bpf_ktime_get_ns();
	o.path = (u64)args->filename;
	o.flags = args->flags;
	openings.update(&tid, &o);
	return 0;
}

TRACEPOINT_PROBE(syscalls, sys_exit_openat)
{
	UNLESS_OVER;
	u64 task = bpf_get_current_pid_tgid();
	u32 tid = task;
	struct opening *o = openings.lookup(&tid);
	struct opened *out;

	if (!o)
		return 0;
	if (args->ret >= 0) {
		out = opens.ringbuf_reserve(sizeof(*out));
		if (out) {
			out->time_ns = bpf_ktime_get_ns();
			out->took_ns = out->time_ns - o->time_ns;
			out->pid = task >> 32;
			out->tid = tid;
			out->fd = args->ret;
			out->flags = o->flags;
			out->path[0] = 0;
			/* what is long is cut: its end is then not found, and it keeps no name */
			bpf_probe_read_user_str(out->path, sizeof(out->path), (void *)o->path);
			opens.ringbuf_submit(out, NO_WAKEUP);
		} else {
			count_lost();
		}
	}
	openings.delete(&tid);
	return 0;
}
#endif

#ifdef HAVE_PROCESSES
TRACEPOINT_PROBE(sched, sched_process_fork)
{
	UNLESS_OVER;
	u32 parent = bpf_get_current_pid_tgid() >> 32, child = args->child_pid;
	u32 recorded = RECORDED;
	struct ranges *inherited;

	if (!tracked.lookup(&parent))
		return 0;
	inherited = mapped.lookup(&parent);
	if (inherited)
		mapped.update(&child, inherited);
	/* a thread's number is here too: it is no process's, and the recorder sorts it out */
	tracked.update(&child, &recorded);
	put(EV_BORN, 0, 0, 0, child, parent);
	return 0;
}

TRACEPOINT_PROBE(sched, sched_process_exec)
{
	UNLESS_OVER;
	u64 task = bpf_get_current_pid_tgid();
	u32 pid = task >> 32;
	struct opened *out;

	if (!is_recorded(pid))
		return 0;
	put(EV_EXEC, 0, 0, 0, 0, 0);
	note_unmapped(pid, 0, ~0ull);
	mapped.delete(&pid);
	out = opens.ringbuf_reserve(sizeof(*out));
	if (out) {
		out->time_ns = bpf_ktime_get_ns();
		out->took_ns = 0;
		out->pid = task >> 32;
		out->tid = task;
		out->fd = -1;
		out->flags = 0;
		out->path[0] = 0;
		TP_DATA_LOC_READ_STR(out->path, filename, sizeof(out->path));
		opens.ringbuf_submit(out, NO_WAKEUP);
	} else {
		count_lost();
	}
	return 0;
}

TRACEPOINT_PROBE(sched, sched_process_exit)
{
	UNLESS_OVER;
	u64 task = bpf_get_current_pid_tgid();
	u32 pid = task >> 32, tid = task;

	fault_over(tid);
	exceptions_over(tid);
	if (tracked.lookup(&tid)) {
		if (pid == tid && is_recorded(pid))
			put(EV_EXIT, 0, 0, 0, 0, 0);
		tracked.delete(&tid);
		mapped.delete(&tid);
	}
	return 0;
}
#endif

#ifdef HAVE_BLOCK
struct request {
	u64 sector;
	u64 device;
};
struct issued {
	u64 time_ns;
	u32 pid, tid;
};
BPF_TABLE("lru_hash", struct request, struct issued, requests, 8192);

TRACEPOINT_PROBE(block, block_rq_issue)
{
	UNLESS_OVER;
	struct request key = { .sector = args->sector, .device = args->dev };
	struct issued i = {};
	u64 task = bpf_get_current_pid_tgid();

	if (args->rwbs[0] != 'R')
		return 0;
	i.time_ns = bpf_ktime_get_ns();
	i.pid = task >> 32;
	i.tid = task;
	requests.update(&key, &i);
	return 0;
}

TRACEPOINT_PROBE(block, block_rq_complete)
{
	UNLESS_OVER;
	struct request key = { .sector = args->sector, .device = args->dev };
	struct issued *i = requests.lookup(&key);
	struct event *e;

	if (!i)
		return 0;
	e = reserve();
	if (e) {
		e->time_ns = bpf_ktime_get_ns();
		e->offset = (u64)args->sector << 9;
		e->length = (u64)args->nr_sector << 9;
		e->value = e->time_ns - i->time_ns;
		e->pid = i->pid;
		e->tid = i->tid;
		e->kind = EV_BLOCK;
		e->file = 0;
		e->aux = args->dev;
		events.ringbuf_submit(e, NO_WAKEUP);
	}
	requests.delete(&key);
	return 0;
}
#endif
