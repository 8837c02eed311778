//! Answers to what cannot be read as a request. The HTTP stack gives them before anything of ours has seen a request,
//! with an empty body; here they get what every other answer has: the error object, and a number.

use axum::http::StatusCode;

use super::error::ApiError;
use super::exchange;

/// What every head ends with.
const END: &str = "\r\n\r\n";

/// Its answers have no body, which none of our own refusals says.
const EMPTY: &str = "\r\ncontent-length: 0";

/// No answer of the stack's own is longer.
const LONGEST: usize = 512;

/// What is written instead of `bytes`, if these are such an answer.
pub(super) fn answer(bytes: &[u8]) -> Option<Vec<u8>> {
    if bytes.len() > LONGEST || !bytes.starts_with(b"HTTP/1.") {
        return None;
    }
    let head = std::str::from_utf8(bytes).ok()?.strip_suffix(END)?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let status = StatusCode::from_u16(status).ok()?;
    let message = match status {
        StatusCode::BAD_REQUEST => {
            "the head of the request is not HTTP/1.1, or what it says of the body's length (Content-Length, \
             Transfer-Encoding) is no length or contradicts itself"
        }
        StatusCode::URI_TOO_LONG => "the address of the request is too long",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => {
            "the head of the request is larger than `server.max_head_kib` allows, or has more than 100 headers; send \
             fewer or shorter ones"
        }
        _ => return None,
    };
    if !head.contains(EMPTY) {
        return None;
    }
    let id = exchange::id(&exchange::number().ok()?);
    tracing::debug!(request = id, status = status.as_u16(), "answered what is no request");
    let body = ApiError::refused(status, message).to_json().to_string();
    let length = format!("\r\ncontent-length: {}", body.len());
    let head = head.replacen(EMPTY, &length, 1);
    let more = format!("\r\ncontent-type: application/json\r\n{}: {id}", exchange::X_REQUEST_ID);
    Some(format!("{head}{more}{END}{body}").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_of_the_stack_are_replaced() {
        let empty = |status: &str| {
            format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\ndate: now\r\n\r\n")
        };
        for status in ["400 Bad Request", "414 URI Too Long", "431 Request Header Fields Too Large"] {
            let told = String::from_utf8(answer(empty(status).as_bytes()).unwrap()).unwrap();
            let (head, body) = told.split_once(END).unwrap();
            assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\nconnection: close\r\n")), "{head}");
            assert!(head.contains(&format!("\r\ncontent-length: {}\r\n", body.len())), "{head}");
            assert!(head.contains("\r\nx-request-id: req-"), "{head}");
            let error: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(error["error"]["type"], "invalid_request_error");
        }
        let whole = empty("431 Too Large");
        for other in [
            &empty("200 OK"),
            &empty("404 Not Found"),
            &whole[..whole.len() - 1],
            &whole.replace(": 0", ": 7"),
            &format!("{whole}more"),
            &whole.replace("HTTP/1.1", "data:"),
        ] {
            assert_eq!(answer(other.as_bytes()), None, "{other}");
        }
    }
}
