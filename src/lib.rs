//! `axe`: text generation on OpenCL devices, served as a daemon.
//!
//! The rooms, lowest first; each imports only from those above it in this list:
//! [`checkpoint`], [`text`], [`device`] · [`ops`] · [`model`] · [`decode`] · [`engine`] · [`http`], [`admin`] ·
//! [`load`] and [`daemon`] tie them together. [`config`] is plain data that the faces may read.
#![deny(missing_docs)]

pub mod admin;
pub mod checkpoint;
pub mod config;
pub mod daemon;
pub mod decode;
pub mod device;
pub mod engine;
pub mod http;
pub mod load;
pub mod model;
pub mod ops;
pub mod text;
