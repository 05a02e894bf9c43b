// SPDX-License-Identifier: Apache-2.0
/*
 * alone.c - a program that is left alone says why, when it maps what would have been served.
 */
#include <sys/socket.h>
#include <sys/un.h>

#include "job/preload.h"

enum up_left_alone up_alone;

void up_say_alone(void)
{
	static _Atomic int said;
	struct sockaddr_un sun = { .sun_family = AF_UNIX };
	struct up_message m = { .header = { UP_MAGIC, UP_VERSION, UP_HELLO } };
	long fd;

	if (atomic_exchange(&said, 1))
		return;
	for (unsigned int i = 0; i < sizeof(sun.sun_path); i++)
		sun.sun_path[i] = up_job.socket_path[i];
	up_introduce(&m.hello);
	m.hello.flags = UP_HELLO_LEFT_ALONE;
	m.hello.uffd_error = (int32_t)up_alone;
	/* For an instant in the job's table of descriptors, where no more than one is taken. */
	fd = up_sys3(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (up_failed(fd))
		return;
	if (!up_failed(up_sys3(SYS_connect, fd, &sun, sizeof(sun))))
		up_sys6(SYS_sendto, fd, (long)&m, sizeof(m), MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0);
	up_sys1(SYS_close, fd);
}
