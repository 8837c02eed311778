"""A small HTTP client for the daemon, from the standard library, shared by the battery and the bench."""

import contextlib
import http.client
import json
import os
import urllib.parse


class Reply:
    """Status, headers (lower-case names) and body of an answer."""

    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)


class Client:
    """One connection per request, so that a test that spoils its connection spoils no other test."""

    def __init__(self, url, timeout=120.0):
        parts = urllib.parse.urlsplit(url)
        self.host, self.port, self.timeout = parts.hostname, parts.port or 80, timeout

    def open(self, method, path, body=None, headers=None):
        """Sends a request; returns the connection and its response, whose body is not read yet."""
        sent = {"Content-Type": "application/json"} if body is not None else {}
        if os.environ.get("AXE_API_KEY"):
            sent["Authorization"] = "Bearer " + os.environ["AXE_API_KEY"]
        sent.update(headers or {})
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        connection.request(method, path, body, sent)
        return connection, connection.getresponse()

    def call(self, method, path, body=None, headers=None):
        connection, response = self.open(method, path, body, headers)
        with contextlib.closing(connection):
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path):
        return self.call("GET", path)

    def post(self, path, body, headers=None):
        return self.call("POST", path, body, headers)

